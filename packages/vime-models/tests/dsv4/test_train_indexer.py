# SPDX-License-Identifier: Apache-2.0
"""The indexer's loss against a dense formula over what transformers computes: its attention weights are the teacher,
its scorer's output is the student, autograd in float64 does the rest.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from vime_convert.megatron.exporter import export_tensors
from vime_convert.verify.compare import relative
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_models.dsv4.plugin import PLUGIN
from vime_models.dsv4.tiny import TINY_CASES

FLOAT64 = PRECISIONS["float64"]
CSA = next(case for case in TINY_CASES if case.name == "csa")


@pytest.fixture(autouse=True)
def unit_loss_scale() -> Iterator[None]:
    """Megatron keeps the scale of auxiliary losses in a class."""
    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    yield
    MoEAuxLossAutoScaler.main_loss_backward_scale = before


def lm_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model: Any, ids: torch.Tensor, precision: Any = FLOAT64) -> dict[str, torch.Tensor]:
    """By release name, of the language-model loss and whatever is attached to it."""
    model.zero_grad()
    with running_in(precision):
        lm_loss(PLUGIN.forward([model], ids), ids).backward()
        named = export_tensors([model], PLUGIN.rules(CSA.config), value=lambda p: p.grad)
        return {name: grad for name, grad in named if grad is not None}


def dense_losses(theirs: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Σ over layers' mean over rows of KL(P ‖ Q), one number per layer, from transformers' tensors."""
    weights, scores = [], []
    handles = []
    for layer in theirs.model.layers:
        attention = layer.self_attn
        handles += [
            attention.register_forward_hook(lambda _m, _i, output: weights.append(output[1])),
            attention.compressor.indexer.scorer.register_forward_hook(lambda _m, _i, o: scores.append(o)),
        ]
    theirs(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    losses = []
    for probs_BHSN, scores_BSM in zip(weights, scores, strict=True):
        entries = scores_BSM.shape[-1]
        mass_SM = probs_BHSN[0, :, :, -entries:].detach().sum(0)
        rows = []
        for mass, score in zip(mass_SM, scores_BSM[0], strict=True):
            seen = mass > 0
            if seen.any():
                P = mass[seen] / mass[seen].sum()
                rows.append((P * (P.log() - score[seen].log_softmax(0))).sum())
        losses.append(torch.stack(rows).mean())
    return losses


@pytest.mark.parametrize("mode", ["joint", "warmup"])
def test_equals_the_dense_formula(mode, build, checkpoint, twin_of):
    """Warm-up attends to every visible entry, as transformers does when the indexer may keep them all."""
    ours = build("csa", "float64", train_indexer=mode, indexer_loss_coeff=0.5)
    twin = twin_of(CSA, FLOAT64, checkpoint("csa"), ours)
    if mode == "warmup":
        for layer in twin.theirs.model.layers:
            layer.self_attn.compressor.indexer.index_topk = CSA.seq_len
    twin.theirs.zero_grad()
    with running_in(FLOAT64):
        losses = dense_losses(twin.theirs, twin.ids)
        (0.5 * torch.stack(losses).sum()).backward()
    grads = gradients(ours, twin.ids)
    for layer, loss in zip(ours.decoder.layers, losses, strict=True):
        value = layer.self_attention.indexer.last_loss
        assert abs(value - 0.5 * loss) < 1e-12 * abs(loss)
        assert value > 0.01
    slots = PLUGIN.rules(CSA.config).dialect("hf-module")
    theirs = dict(twin.theirs.named_parameters())
    names = [name for name in PLUGIN.rules(CSA.config).expected_hf() if ".indexer." in name]
    assert len(names) == 6 * len(losses)
    for name in names:
        assert relative(grads[name], theirs[slots.slot(name).stored].grad) < 1e-10, name
    if mode == "warmup":
        assert set(grads) == set(names)


def test_the_two_losses_train_different_parameters(build):
    ids = torch.randint(160, (1, 96), generator=torch.Generator().manual_seed(0))
    alone = gradients(build("csa", "float64"), ids)
    joint = gradients(build("csa", "float64", train_indexer="joint"), ids)
    assert not any(".indexer." in name for name in alone)
    assert {name for name in joint if ".indexer." in name}
    for name, grad in alone.items():
        assert torch.equal(joint[name], grad), name


def test_the_loss_follows_megatrons_scale_and_its_own_weight(build):
    ids = torch.randint(160, (1, 96), generator=torch.Generator().manual_seed(0))
    once = gradients(build("csa", "float64", train_indexer="joint"), ids)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(4.0, dtype=torch.float64))
    scaled = gradients(build("csa", "float64", train_indexer="joint", indexer_loss_coeff=0.5), ids)
    for name in once:
        factor = 2.0 if ".indexer." in name else 1.0
        assert torch.allclose(scaled[name], factor * once[name], rtol=1e-12, atol=0)


def test_per_token_loss_is_the_sum(build):
    ids = torch.randint(160, (1, 96), generator=torch.Generator().manual_seed(0))
    mean = build("csa", "float64", train_indexer="joint")
    total = build("csa", "float64", train_indexer="joint", calculate_per_token_loss=True)
    for model in (mean, total):
        gradients(model, ids)
    # Rows 0, 1 and 2 see no entry and are not counted.
    for a, b in zip(mean.decoder.layers, total.decoder.layers, strict=True):
        losses = [layer.self_attention.indexer.last_loss for layer in (a, b)]
        assert torch.allclose(losses[0] * (96 - 3), losses[1], rtol=1e-12)


def packed(lengths: list[int], padded: list[int]) -> PackedSeqParams:
    def cumulative(values: list[int]) -> torch.Tensor:
        return torch.tensor([0, *values]).cumsum(0).to(torch.int32)

    real, all_rows = cumulative(lengths), cumulative(padded)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=all_rows,
        cu_seqlens_kv_padded=all_rows,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )


def test_padding_between_packed_sequences_is_not_counted(build):
    ids = torch.randint(160, (1, 60), generator=torch.Generator().manual_seed(1))
    model = build("csa", "float64", train_indexer="joint")

    def losses(tokens: torch.Tensor, params: PackedSeqParams) -> list[float]:
        with running_in(FLOAT64):
            model(tokens, None, None, packed_seq_params=params)
        return [layer.self_attention.indexer.last_loss.item() for layer in model.decoder.layers]

    tight = losses(ids, packed([21, 39], [21, 39]))
    gap = torch.full((1, 9), 7)
    spread = torch.cat([ids[:, :21], gap, ids[:, 21:], gap], 1)
    assert losses(spread, packed([21, 39], [30, 48])) == pytest.approx(tight, rel=1e-12)
    assert losses(spread, packed([30, 48], [30, 48])) != pytest.approx(tight, rel=1e-3)


def test_no_gradients_no_loss(build):
    model = build("csa", "float32", train_indexer="joint")
    with torch.no_grad():
        PLUGIN.forward([model], torch.arange(32)[None])
    assert model.decoder.layers[0].self_attention.indexer.last_loss is None


def test_warmup_with_recomputation_gives_the_same_gradients(build):
    ids = torch.randint(160, (1, 96), generator=torch.Generator().manual_seed(0))
    plain = build("csa", "float32", train_indexer="warmup").train()
    again = build(
        "csa",
        "float32",
        train_indexer="warmup",
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    ).train()
    expected, got = (gradients(model, ids, PRECISIONS["float32"]) for model in (plain, again))
    assert expected
    assert all(torch.equal(got[name], grad) for name, grad in expected.items())


def test_warmup_refuses_a_model_that_nobody_froze(build):
    model = build("csa", "float32", train_indexer="warmup").requires_grad_()
    with pytest.raises(RuntimeError, match="warmup trains nothing but the indexer"):
        model(torch.arange(32)[None], None, None)


def test_training_lowers_the_loss_and_leaves_the_rest_alone(build):
    ids = torch.randint(160, (1, 96), generator=torch.Generator().manual_seed(0))
    model = build("csa", "float32", train_indexer="warmup")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.1
    )
    losses = []
    for _ in range(8):
        gradients(model, ids, PRECISIONS["float32"])
        optimizer.step()
        losses.append(sum(layer.self_attention.indexer.last_loss.item() for layer in model.decoder.layers))
    assert losses[-1] < 0.9 * losses[0]
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".indexer." in name}
