# SPDX-License-Identifier: Apache-2.0
"""What is measured: the operations at the shapes of the models that use them.

A `Case` makes a `Problem` for any number of query rows. Picks look like a trained selection: causal, ascending, and
alike for neighbouring rows.
"""

from collections.abc import Iterator
from dataclasses import replace

from attention import attention, loss, teacher
from models import FLASH, GLM5, GLM53, PRO, V32
from problem import Case
from selection import logits, pick, pools, scores, selection
from small import combine, gate, head, mixes, pool, post, pre, quantise, rotation, sinkhorn

from vime_kernels import quant

REPEATABLE = ("fwd", "bwd", "bwd repeatable")


def cases() -> Iterator[Case]:
    """All cases, the costly operations first."""
    for model in (FLASH, PRO, V32, GLM5, GLM53):
        name = "sparse_attention_v4" if model.window else "sparse_attention"
        yield Case(name, f"{model.name} picks", lambda s, m=model: attention(s, m), REPEATABLE)
    v4 = "sparse_attention_v4"
    yield Case(v4, "V4-Flash picks, context 4k", lambda s: attention(s.at(4096), FLASH))
    yield Case(v4, "V4-Flash ranges", lambda s: attention(s, replace(FLASH, ratio=128), "ranges"))
    yield Case(v4, "V4-Flash window", lambda s: attention(s, FLASH, "window"))
    for heads in (16, 8):
        local = replace(FLASH, heads=heads)
        yield Case(v4, f"V4-Flash, {heads} heads", lambda s, m=local: attention(s, m))
    yield Case(
        v4, "V4-Flash 128k tokens", lambda s: attention(s.at(2**17, 2**17), FLASH), ("fwd", "bwd"), large=True
    )
    for model in (FLASH, V32, GLM5):
        for precision in ("bf16", "fp8"):
            shape = f"{model.name} {precision}"
            yield Case("indexer_logits", shape, lambda s, m=model, p=precision: logits(s, m, p), ("fwd",))
        shape = f"{model.name} fp8, uncleaned"
        yield Case("indexer_logits", shape, lambda s, m=model: logits(s, m, "fp8", False), ("fwd",))
        yield Case("indexer_scores", model.name, lambda s, m=model: scores(s, m), REPEATABLE)
        yield Case("indexer_kl_target", model.name, lambda s, m=model: teacher(s, m), ("fwd",))
        yield Case("indexer_kl_loss", model.name, lambda s, m=model: loss(s, m))
    for model, context in ((FLASH, 16), (FLASH, 64), (PRO, 64), (V32, 16), (FLASH, 512), (V32, 128)):
        columns = context // model.ratio
        yield Case(
            "topk",
            f"{model.topk} of {columns}k",
            lambda s, m=model, c=context: selection(s.at(c * 1024), m),
            ("fwd",),
        )
    pooled = replace(GLM53, ratio=4, topk=512)
    for model in (FLASH, V32, pooled):
        yield Case("indexer_topk", model.name, lambda s, m=model: pick(s, m), ("fwd",))
    yield Case(
        "indexer_topk",
        "V4-Flash 128k tokens",
        lambda s: pick(s.at(2**17, 2**17), FLASH),
        ("fwd",),
        large=True,
    )
    yield Case("kpool_select", "GLM-5.3", lambda s: pools(s, GLM53), ("fwd",))
    yield Case("gated_pool", "V4 ratio 4", lambda s: pool(s, 512, 4, True))
    yield Case("gated_pool", "V4 ratio 128", lambda s: pool(s, 512, 128, False))
    yield Case("gated_pool", "GLM-5.3 keys", lambda s: pool(s, 128, 4, False))
    fwd = ("fwd",)
    yield Case("fake_quant_fp8", "V4 latent", lambda s: quantise(s, quant.fake_quant_fp8, 448, block=64), fwd)
    yield Case(
        "fake_quant_fp8", "V4 index", lambda s: quantise(s, quant.fake_quant_fp8, 8192, block=128), fwd
    )
    yield Case(
        "fake_quant_fp4", "V4 experts", lambda s: quantise(s, quant.fake_quant_fp4, 4096, block=32), fwd
    )
    yield Case("act_quant", "V4 index", lambda s: quantise(s, quant.act_quant, 8192, block=128), fwd)
    yield Case("hadamard", "V4 index keys", lambda s: quantise(s, quant.hadamard, 128), fwd)
    for model in (FLASH, PRO):
        yield Case("mhc_mixes", model.name, lambda s, m=model: mixes(s, m))
        yield Case("mhc_pre", model.name, lambda s, m=model: pre(s, m))
        yield Case("mhc_post", model.name, lambda s, m=model: post(s, m))
        yield Case("mhc_head", model.name, lambda s, m=model: head(s, m))
    yield Case("sinkhorn", "4 x 4", sinkhorn)
    yield Case("rotate", "V4-Flash queries", lambda s: rotation(s, FLASH))
    yield Case("swiglu", "V4-Flash experts", lambda s: gate(s, 2048))
    yield Case("gather_sum", "V4-Flash experts", lambda s: combine(s, 4096, 6), fwd)
