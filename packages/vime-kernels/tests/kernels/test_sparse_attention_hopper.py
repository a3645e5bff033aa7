# SPDX-License-Identifier: Apache-2.0
"""The backward kernel for Hopper with dKV in a warpgroup of its own: what it is given, hands over and leaves."""

import pytest
import torch

from vime_kernels._backend import has_gluon
from vime_kernels.dsa import sparse_attention, sparse_attention_v4
from vime_kernels.ops.sparse_attention import fused_bwd
from vime_kernels.ops.sparse_attention.sources import Sources
from vime_kernels.ops.sparse_attention.triton_places import in_order, used_lengths
from vime_kernels.ops.sparse_attention.triton_ranks import ranks
from vime_kernels.testing import assert_bitwise, rel_rms

# Triton 3.6 reads loop bounds from one-element arrays in its interpreter, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.mark.parametrize("run", [4, 8], ids=["of-four", "of-eight"])
@pytest.mark.parametrize("rows", [0, 1, 13], ids=["none", "one", "more-than-a-block"])
def test_places_are_put_in_order(device, rows, run):
    at = torch.arange(576)
    block, q, h, e = at // (4 * run), at % (4 * run) // run, at % run // 2, at % 2
    sums = torch.randn(rows, 576).to(device)
    ordered = in_order(sums, torch.empty(0, device=device), run)
    expected = torch.empty_like(sums)
    expected[:, (4 * run * block + 8 * h + 2 * q + e).to(device)] = sums
    assert_bitwise(ordered, expected)


def test_empty_slots_at_the_end_are_left_out(device):
    indices = torch.tensor(
        [[3, -1, 0, -1, -1], [-1] * 5, [7, 8, 6, 7, 9], [0, 1, 2, 3, 4]], dtype=torch.int32
    )
    lengths = torch.tensor([5, 5, 5, 2], dtype=torch.int32)
    used = used_lengths(indices.to(device), lengths.to(device), 7)
    assert used.tolist() == [3, 0, 3, 2]
    assert used_lengths(indices.to(device), None, 7).tolist() == [3, 0, 3, 5]


@pytest.mark.parametrize("keys", ["picks", "lengths", "window-and-picks", "window-and-ranges", "window"])
def test_ranks_are_places_in_a_sort_by_key(device, keys):
    torch.manual_seed(0)
    S, n_a, n_b, K, width = 7, 9, 11, 70, 5
    starts = torch.randint(-2, 5, (S,), dtype=torch.int32)
    ends = starts + torch.randint(0, width, (S,), dtype=torch.int32)
    indices = torch.randint(-2, n_b + 2, (S, K), dtype=torch.int32)
    lengths = torch.randint(-1, K + 3, (S,), dtype=torch.int32)
    band = {"kv_a": torch.zeros(n_a, 1), "starts_a": starts, "ends_a": ends, "width_a": width}
    parts = band if keys.startswith("window") else {}
    if keys.endswith("ranges"):
        parts |= {"kv_b": torch.zeros(n_b, 1), "starts_b": starts - 1, "ends_b": ends + 9}
    elif keys != "window":
        parts |= {
            "kv_b": torch.zeros(n_b, 1),
            "indices": indices,
            "lengths": lengths if keys == "lengths" else None,
        }
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in parts.items()}
    rank, offsets = ranks(Sources(**moved), S)
    named = []  # (key, row, slot)
    first = n_a if "kv_a" in parts else 0
    n = first + (n_b if "kv_b" in parts else 0)
    for row in range(S):
        behind = 0
        if "kv_a" in parts:
            seen = range(max(int(starts[row]), 0), min(int(ends[row]), n_a))
            named += [(key, row, slot) for slot, key in enumerate(seen)]
            behind = 64 * -(-len(seen) // 64)
        if "starts_b" in parts:
            seen = range(max(int(starts[row]) - 1, 0), min(int(ends[row]) + 9, n_b))
            named += [(first + key, row, behind + slot) for slot, key in enumerate(seen)]
        elif "indices" in parts:
            used = K if keys != "lengths" else max(0, int(lengths[row]))
            picks = indices[row, :used].tolist()
            named += [(first + key, row, behind + slot) for slot, key in enumerate(picks) if 0 <= key < n_b]
    expected = torch.full(rank.shape, -1, dtype=torch.int32)
    for place, (_, row, slot) in enumerate(sorted(named)):
        expected[row, slot] = place
    assert_bitwise(rank.cpu(), expected)
    assert offsets.tolist() == [sum(each[0] < key for each in named) for key in range(n + 1)]


def gradients(call, tensors, grad):
    leaves = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad((call(*leaves) * grad).sum(), leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "repeatable"])
@pytest.mark.parametrize("keys", ["picks", "picks-576", "window-and-picks", "window", "window-and-ranges"])
def test_rows_of_every_length(monkeypatch, keys, deterministic):
    """Each program takes many rows, of no tile to seven, and both blocks of heads, of which the second is not full."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not has_gluon():
        # Elsewhere the plain kernels run, which have tests of their own.
        pytest.skip("needs a Hopper GPU and the Triton version whose Gluon the kernel was written for")
    torch.manual_seed(3)
    S, N, H, K, D = 900, 700, 80, 320, 576 if keys == "picks-576" else 512
    rand = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()  # noqa: E731
    q, kv, win, grad = rand(S, H, D), rand(N, D), rand(S, D), rand(S, H, 512)
    slots = torch.arange(K, device="cuda")
    ends = torch.randint(0, K + 1, (S, 1), device="cuda") * (torch.arange(S, device="cuda") % 5 > 0)[:, None]
    indices = torch.randint(0, N, (S, K), dtype=torch.int32, device="cuda").masked_fill(slots >= ends, -1)
    sink = None if keys == "picks-576" else torch.randn(H, device="cuda")
    cu_seqlens = torch.tensor([0, 3, 500, S], dtype=torch.int32, device="cuda")
    scale = D**-0.5
    band = {"window": 100, "cu_seqlens": cu_seqlens, "deterministic": deterministic}
    # Several chunks, the last of another length.
    monkeypatch.setattr(fused_bwd, "WORKSPACE_BYTES", 2**27)
    if keys == "window-and-picks":
        band["indices"] = indices
    elif keys == "window-and-ranges":
        band["cmp_ranges"] = (torch.zeros_like(ends[:, 0]).int(), ends[:, 0].int())

    def call(backend):
        if keys.startswith("picks"):
            return lambda q, kv: sparse_attention(
                q, kv, indices, scale, d_v=512, attn_sink=sink, deterministic=deterministic, backend=backend
            )
        if keys == "window":
            return lambda q, win: sparse_attention_v4(q, win, None, scale, sink, **band, backend=backend)
        return lambda q, win, kv: sparse_attention_v4(q, win, kv, scale, sink, **band, backend=backend)

    tensors = (q, kv) if keys.startswith("picks") else (q, win) if keys == "window" else (q, win, kv)
    expected = gradients(call("torch"), [t.double() for t in tensors], grad.double())
    first = gradients(call("triton"), tensors, grad)
    for ours, exact in zip(first, expected, strict=True):
        assert rel_rms(ours, exact) < 6e-3
    for _ in range(10):
        again = gradients(call("triton"), tensors, grad)
        # The order of atomics, and so of the sums of dKV, is free; dQ has none.
        for one, other in list(zip(first, again, strict=True))[: None if deterministic else 1]:
            assert_bitwise(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "repeatable"])
def test_lists_of_one_pick(deterministic):
    """A size of one is a constant to the compiler."""
    torch.manual_seed(4)
    q, kv, grad = (torch.randn(*n, 512, device="cuda").bfloat16() for n in ((30, 64), (9,), (30, 64)))
    indices = torch.randint(-1, 9, (30, 1), dtype=torch.int32, device="cuda")

    def call(backend):
        return lambda q, kv: sparse_attention(
            q, kv, indices, 0.05, deterministic=deterministic, backend=backend
        )

    expected = gradients(call("torch"), [q.double(), kv.double()], grad.double())
    ours = gradients(call("triton"), (q, kv), grad)
    assert rel_rms(ours[1], expected[1]) < 6e-3
    # The only key has all the weight, whatever its score.
    assert ours[0].float().abs().max() < 0.1
