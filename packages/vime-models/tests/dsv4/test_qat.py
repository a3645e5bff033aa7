# SPDX-License-Identifier: Apache-2.0
"""Quantisation simulation against transformers, into which a quantiser written in numpy is put at the same places.

In float64, so that both programs hand the same float32 values to their quantisers: two float32 programs differ in
the last bit, and a rounding decided the other way is a difference of several percent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from vime_convert.megatron.loader import load_checkpoint
from vime_convert.plugin import TinyCase
from vime_convert.reader import CheckpointReader
from vime_convert.tiny import make_tiny
from vime_convert.verify.compare import relative
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_models.dsv4 import qat
from vime_models.dsv4.plugin import PLUGIN
from vime_models.dsv4.tiny import TINY_CASES

# Heads that fill whole blocks: 64 channels that do not rotate, and the indexer's released width.
WIDE = TINY_CASES[0].config | {
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0],
    "num_hash_layers": 1,
    "head_dim": 80,
    "index_head_dim": 128,
}
CASE = TinyCase("wide", WIDE, seq_len=300, covers="whole quantisation blocks")
FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8 = np.array(
    [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
)[:-1]


def numpy_round_trip(x: np.ndarray, block: int, codes: np.ndarray, floor: float) -> np.ndarray:
    """Blocks of the last axis to the nearest code times a power of two: float64 in and out, float32 inside."""
    blocks = x.astype(np.float32).astype(np.float64).reshape(*x.shape[:-1], -1, block)
    amax = np.maximum(np.abs(blocks).max(-1, keepdims=True), floor)
    mantissa, exponent = np.frexp(amax / codes[-1])
    scaled = blocks / np.ldexp(1.0, exponent - (mantissa == 0.5))
    upper = np.searchsorted(codes, np.abs(scaled)).clip(1, len(codes) - 1)
    below, above = np.abs(scaled) - codes[upper - 1], codes[upper] - np.abs(scaled)
    index = np.where((above < below) | ((above == below) & (upper % 2 == 0)), upper, upper - 1)
    return (np.copysign(codes[index], scaled) * np.ldexp(1.0, exponent - (mantissa == 0.5))).reshape(x.shape)


def oracle(x: torch.Tensor, block: int, codes: np.ndarray, floor: float) -> torch.Tensor:
    """The same on tensors, with a gradient that passes straight through."""
    rounded = torch.from_numpy(numpy_round_trip(x.detach().double().numpy(), block, codes, floor)).to(x.dtype)
    return rounded + (x - x.detach())


def hadamard_matrix(n: int) -> torch.Tensor:
    bits = np.bitwise_count(np.arange(n)[:, None] & np.arange(n))
    return torch.from_numpy((1.0 - 2.0 * (bits % 2)) * n**-0.5)


def oracle_indexer(x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode in ("deepseek", "miles"):
        x = x @ hadamard_matrix(x.shape[-1]).to(x.dtype)
    return oracle(x, 32, FP4, 6 * 2.0**-126) if mode == "deepseek" else oracle(x, 128, FP8, np.float32(1e-4))


@contextmanager
def transformers_quantises(mode: str, head_dim: int, rope_dim: int) -> Iterator[None]:
    """The rotation is the last step before every cache, so the quantiser is put behind it."""
    original = hf.apply_rotary_pos_emb

    def rotate_then_quantise(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotated = original(x, cos, sin)
        if rotated.shape[-1] != head_dim:
            return oracle_indexer(rotated, mode)
        if rotated.shape[1] != 1:
            return rotated  # queries, and outputs that turn back
        still = oracle(rotated[..., :-rope_dim], 64, FP8, np.float32(1e-4))
        return torch.cat([still, rotated[..., -rope_dim:]], -1)

    hf.apply_rotary_pos_emb = rotate_then_quantise
    try:
        yield
    finally:
        hf.apply_rotary_pos_emb = original


def on_float32_bits(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`function` outside the mode that turns float32 into float64: quantisation is defined on float32."""

    def outside(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _pop_mode_temporarily() if _get_current_function_mode() else nullcontext():
            return function(*args, **kwargs)

    return outside


@pytest.fixture
def runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, twin_of: Callable[..., Any]
) -> Callable[[str], tuple[Any, Any]]:
    """Ours and transformers' run of a mode."""
    for name in ("fake_quant_fp8", "fake_quant_fp4"):
        monkeypatch.setattr(qat, name, on_float32_bits(getattr(qat, name)))

    def run(mode: str) -> tuple[Any, Any]:
        precision = PRECISIONS["float64"]
        make_tiny(WIDE, tmp_path, seed=0, plugin=PLUGIN)
        with running_in(precision):
            (ours,) = PLUGIN.build(WIDE, dtype=precision.dtype, device="cpu", qat=mode)
        load_checkpoint([ours], CheckpointReader(tmp_path), PLUGIN.rules(WIDE))
        with transformers_quantises(mode, WIDE["head_dim"], WIDE["qk_rope_head_dim"]):
            twin = twin_of(CASE, precision, tmp_path, ours)
            if mode == "deepseek":
                for layer in twin.theirs.model.layers:
                    for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                        weight.data = oracle(weight.data, 32, FP4, 6 * 2.0**-126)
            return twin.run_ours(), twin.run_theirs()

    return run


@pytest.mark.parametrize("mode", ["rollout", "deepseek", "miles"])
def test_equal_to_transformers_with_a_quantiser_of_its_own(mode, runs):
    ours, theirs = runs(mode)
    assert (ours.logits - theirs.logits).abs().max() < 1e-10
    assert set(theirs.grads) >= {"layers.1.attn.wkv.weight", "layers.0.ffn.experts.0.w1.weight"}
    total = torch.stack([grad.norm() for grad in theirs.grads.values()]).norm()
    for name, grad in theirs.grads.items():
        if ".indexer." in name:
            continue
        difference = relative(ours.grads[name], grad, floor=1e-8 * total.item())
        assert difference < 1e-9, (name, difference)


@pytest.mark.parametrize("mode", ["off", "rollout", "deepseek", "miles"])
def test_modes_are_four_functions(mode, tmp_path):
    """Agreement above means something only if leaving a rounding out, or taking another one, shows."""
    make_tiny(WIDE, tmp_path, seed=0, plugin=PLUGIN)
    ids = torch.arange(64)[None] % WIDE["vocab_size"]
    logits = []
    for chosen in (mode, *({"off", "rollout", "deepseek", "miles"} - {mode})):
        (model,) = PLUGIN.build(WIDE, dtype=torch.float32, device="cpu", qat=chosen)
        load_checkpoint([model], CheckpointReader(tmp_path), PLUGIN.rules(WIDE))
        with torch.no_grad():
            logits.append(PLUGIN.forward([model], ids))
    for other in logits[1:]:
        assert (other - logits[0]).abs().max() > 1e-2


def test_the_plugin_simulates_nothing_unless_asked():
    (model,) = PLUGIN.build(WIDE, dtype=torch.float32, device="cpu")
    assert model.config.vime_dsv4.qat == "off"


@pytest.mark.parametrize("mode", ["rollout", "deepseek"])
def test_bfloat16_keeps_its_float32_parameters_and_stays_close(mode, tmp_path):
    make_tiny(WIDE, tmp_path, seed=0, plugin=PLUGIN)
    ids = torch.arange(64)[None] % WIDE["vocab_size"]
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        (model,) = PLUGIN.build(WIDE, dtype=dtype, device="cpu", qat=mode)
        load_checkpoint([model], CheckpointReader(tmp_path), PLUGIN.rules(WIDE))
        logits[dtype] = PLUGIN.forward([model], ids)
        logits[dtype].float().logsumexp(-1).mean().backward()
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    leaves = {name.rsplit(".", 1)[1] for name in kept}
    streams = {f"hc_{block}_{part}" for block in ("attn", "ffn", "head") for part in ("fn", "base", "scale")}
    assert leaves == streams | {"attn_sink", "ape"}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.isfinite().all(), name
    assert relative(logits[torch.bfloat16], logits[torch.float32]) < 0.2
