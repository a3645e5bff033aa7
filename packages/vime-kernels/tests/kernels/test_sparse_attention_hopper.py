# SPDX-License-Identifier: Apache-2.0
"""The backward kernel for Hopper that adds dKV in a warpgroup of its own: what it is given, hands over and leaves."""

import pytest
import torch

from vime_kernels._backend import has_gluon
from vime_kernels.dsa import sparse_attention, sparse_attention_v4
from vime_kernels.ops.sparse_attention.triton_places import in_order, used_lengths
from vime_kernels.testing import assert_bitwise, rel_rms

# Triton 3.6 reads loop bounds from one-element arrays in its interpreter, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.mark.parametrize("rows", [0, 1, 13], ids=["none", "one", "more-than-a-block"])
def test_places_are_put_in_order(device, rows):
    at = torch.arange(576)
    block, q, h, e = at // 16, at % 16 // 4, at % 4 // 2, at % 2
    sums = torch.randn(rows, 576).to(device)
    ordered = in_order(sums, torch.empty(0, device=device))
    expected = torch.empty_like(sums)
    expected[:, (16 * block + 8 * h + 2 * q + e).to(device)] = sums
    assert_bitwise(ordered, expected)


def test_empty_slots_at_the_end_are_left_out(device):
    indices = torch.tensor(
        [[3, -1, 0, -1, -1], [-1] * 5, [7, 8, 6, 7, 9], [0, 1, 2, 3, 4]], dtype=torch.int32
    )
    lengths = torch.tensor([5, 5, 5, 2], dtype=torch.int32)
    used = used_lengths(indices.to(device), lengths.to(device), 7)
    assert used.tolist() == [3, 0, 3, 2]
    assert used_lengths(indices.to(device), None, 7).tolist() == [3, 0, 3, 5]


def gradients(call, tensors, grad):
    leaves = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad((call(*leaves) * grad).sum(), leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["picks", "picks-576", "window-and-picks", "window", "window-and-ranges"])
def test_rows_of_every_length(keys):
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
    band = {"window": 100, "cu_seqlens": cu_seqlens}
    if keys == "window-and-picks":
        band["indices"] = indices
    elif keys == "window-and-ranges":
        band["cmp_ranges"] = (torch.zeros_like(ends[:, 0]).int(), ends[:, 0].int())

    def call(backend):
        if keys.startswith("picks"):
            return lambda q, kv: sparse_attention(
                q, kv, indices, scale, d_v=512, attn_sink=sink, backend=backend
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
        assert_bitwise(gradients(call("triton"), tensors, grad)[0], first[0])


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
