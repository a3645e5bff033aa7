# SPDX-License-Identifier: Apache-2.0
"""The model equals transformers' DeepseekV4ForCausalLM: logits, streams after every layer, every gradient."""

import pytest
import torch

from vime_models.dsv4 import attention, hyper_connection, indexer, layer, moe, rope, thd
from vime_models.dsv4.tiny import TINY_CASES

NAMES = [case.name for case in TINY_CASES]
# logits absolute; streams and gradients relative. Two correct float32 programs differ by up to half of this.
LIMITS = {"float64": (1e-10, 1e-11, 1e-9), "float32": (5e-5, 1e-5, 1e-3)}


def relative(ours: torch.Tensor, theirs: torch.Tensor, floor: float = 0.0) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp_min(floor)).item()


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_streams_and_gradients_equal_transformers(twin, name, precision):
    pair = twin(name, precision)
    ours, theirs = pair.run_ours(), pair.run_theirs()
    logits, streams, grads = LIMITS[precision]
    assert theirs.logits.std() >= 1
    assert (ours.logits - theirs.logits).abs().max() <= logits
    assert len(ours.streams) == len(theirs.streams)
    for index, (mine, reference) in enumerate(zip(ours.streams, theirs.streams, strict=True)):
        assert relative(mine, reference) <= streams, f"streams after layer {index}"

    frozen = {name for name in pair.table.expected_hf() if ".indexer." in name}
    buffers = {name for name in pair.table.expected_hf() if name.endswith(("tid2eid", "gate.bias"))}
    assert set(theirs.grads) == set(pair.table.expected_hf()) - frozen - buffers
    assert set(ours.grads) == set(theirs.grads)
    floor = 1e-8 * sum(grad.norm() ** 2 for grad in theirs.grads.values()).sqrt().item()
    for tensor, reference in theirs.grads.items():
        assert relative(ours.grads[tensor], reference, floor) <= grads, tensor


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_its_sequences(twin, name):
    pair = twin(name, "float64")
    ids = pair.ids.view(-1)[:258].view(2, 129)
    both = pair.logits(ids)
    for row in range(2):
        torch.testing.assert_close(pair.logits(ids[row : row + 1])[0], both[row], rtol=0, atol=1e-11)


def _half_open(ratio: int):
    def visible(self, given):
        starts, ends = ORIGINAL_VISIBLE(self, given)
        return starts, (ends - 1).maximum(starts) if given == ratio else ends

    return visible


ORIGINAL_VISIBLE = thd.TokenLayout.visible
ORIGINAL_ENTRY_POSITIONS = thd.TokenLayout.entry_positions
ORIGINAL_CONNECT = hyper_connection.mhc_mixes
ORIGINAL_POST = hyper_connection.mhc_post

# What a slip of the pen would look like; every one must move the logits.
MISTAKES = {
    "output not rotated back": (
        attention,
        "rotate",
        lambda *a, **k: rope.rotate(*a, **k | {"inverse": False}),
    ),
    "one table for every layer": (
        rope.RotaryTable,
        "cos_sin",
        lambda self, positions, dtype: (
            (positions[:, None] * rope._inv_freq(rope.RotaryTable(16, 1e4), dtype, positions.device)).cos(),
            (positions[:, None] * rope._inv_freq(rope.RotaryTable(16, 1e4), dtype, positions.device)).sin(),
        ),
    ),
    "entry visible one token late in CSA": (thd.TokenLayout, "visible", _half_open(4)),
    "entry visible one token late in HCA": (thd.TokenLayout, "visible", _half_open(128)),
    "entries at the end of their group": (
        thd.TokenLayout,
        "entry_positions",
        lambda self, entries, ratio: ORIGINAL_ENTRY_POSITIONS(self, entries, ratio) + ratio,
    ),
    "query heads not normalised": (
        attention,
        "rotate",
        lambda *a, **k: rope.rotate(*a, **k | {"norm_eps": None}),
    ),
    "stream mixing not transposed": (
        hyper_connection,
        "mhc_post",
        lambda y, X, post, comb, **k: ORIGINAL_POST(y, X, post, comb.transpose(1, 2), **k),
    ),
    "one Sinkhorn pass too few": (
        hyper_connection,
        "mhc_mixes",
        lambda *a, iters, **k: ORIGINAL_CONNECT(*a, iters=iters - 1, **k),
    ),
    "epsilons swapped": (
        hyper_connection,
        "mhc_mixes",
        lambda *a, eps, norm_eps, **k: ORIGINAL_CONNECT(*a, eps=norm_eps, norm_eps=eps, **k),
    ),
    "scores without a root": (moe, "router_scores", torch.nn.functional.softplus),
    "indexer without rotation": (indexer, "rotate", lambda x, *a, **k: x),
    "sub-blocks share a connection": (
        layer,
        "connect",
        lambda module, prefix, X, block: hyper_connection.connect(module, "hc_attn", X, block),
    ),
}


@pytest.mark.mutation
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_moves_the_logits(twin, monkeypatch, mistake):
    pair = twin("large-eps", "float64")
    correct = pair.logits()
    monkeypatch.setattr(*MISTAKES[mistake])
    assert (pair.logits() - correct).abs().max() >= 1e-6
