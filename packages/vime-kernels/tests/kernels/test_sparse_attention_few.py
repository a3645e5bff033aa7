# SPDX-License-Identifier: Apache-2.0
"""Few heads: united lists hold every row's keys, and attention over them agrees with the torch reference."""

from collections import Counter

import pytest
import torch

from vime_kernels.dsa import sparse_attention, sparse_attention_v4
from vime_kernels.ops.sparse_attention import config
from vime_kernels.ops.sparse_attention.sources import Sources
from vime_kernels.ops.sparse_attention.triton_unite import unite
from vime_kernels.testing import assert_bitwise, rel_rms

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
N, M, K, WINDOW = 50, 40, 20, 7


def ascending(S):
    picks = torch.stack([torch.randperm(M)[:K] for _ in range(S)]).sort(1).values
    picks[S // 2, K // 2 :] = -1
    return {"kv_b": torch.zeros(M, 4), "indices": picks.int()}


def repeated(S):
    return {"kv_b": torch.zeros(M, 4), "indices": torch.randint(0, M, (S, K)).sort(1).values.int()}


def unordered(S):
    lengths = torch.randint(-1, K + 3, (S,), dtype=torch.int32)
    picks = torch.randint(-3, M + 3, (S, K), dtype=torch.int32)
    return {"kv_b": torch.zeros(M, 4), "indices": picks, "lengths": lengths}


def ranges(S):
    ends = torch.randint(0, M + 3, (S,), dtype=torch.int32)
    return {"kv_b": torch.zeros(M, 4), "starts_b": torch.zeros(S).int() - 1, "ends_b": ends}


def window(at):
    return {
        "kv_a": torch.zeros(N, 4),
        "starts_a": (at - WINDOW + 1).clamp(min=0).int(),
        "ends_a": (at + 1).int(),
        "width_a": WINDOW,
    }


def causal(S):
    return window(torch.arange(N - S, N))


def scattered(S):
    return window(torch.randperm(N)[:S])


def both(first, second):
    return lambda S: first(S) | second(S)


def keys_of(sources, s):
    """Every key of query row s, as often as it counts."""
    found, n_a = Counter(), 0
    if sources.kv_a is not None:
        n_a = len(sources.kv_a)
        found.update(range(int(sources.starts_a[s]), int(sources.ends_a[s])))
    if sources.indices is not None:
        length = K if sources.lengths is None else max(0, int(sources.lengths[s]))
        found.update(n_a + i for i in sources.indices[s, :length].tolist() if 0 <= i < M)
    if sources.starts_b is not None:
        found.update(n_a + i for i in range(min(int(sources.ends_b[s]), M)))
    return found


@pytest.mark.parametrize("S, group", [(8, 2), (13, 4), (11, 8)], ids=["2", "4-odd", "8-odd"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(both(causal, ascending), id="ascending"),
        pytest.param(both(causal, repeated), id="repeated"),
        pytest.param(both(scattered, unordered), id="unordered"),
        pytest.param(both(causal, ranges), id="ranges"),
        pytest.param(scattered, id="scattered-windows"),
        pytest.param(ascending, id="no-window"),
    ],
)
def test_united_lists_hold_every_rows_keys(device, make, S, group):
    torch.manual_seed(S)
    sources = Sources(**make(S))
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(sources).items()}
    united = unite(Sources(**moved), S, 1, group)
    for s in range(group * len(united.lengths)):
        words = united.indices[s // group, : united.lengths[s // group]].tolist()
        found = Counter(word & 0x7FFFFF for word in words if word >= 0 and word >> (23 + s % group) & 1)
        assert found == (keys_of(sources, s) if s < S else Counter())


def test_neighbours_name_a_common_key_once(device):
    picks = torch.arange(K, dtype=torch.int32, device=device).expand(8, K).contiguous()
    united = unite(Sources(kv_b=torch.zeros(M, 4, device=device), indices=picks), 8, 1, 8)
    assert united.lengths.tolist() == [K]
    assert united.indices[0, :K].tolist() == [255 << 23 | i for i in range(K)]


def test_words_of_a_window_are_no_more_than_the_rows_it_is_cut_from(device):
    rows = torch.arange(N, dtype=torch.int32, device=device)
    band = Sources(torch.zeros(N, 4, device=device), torch.zeros_like(rows), rows + 1, width_a=2**40)
    assert unite(band, N, 1, 8).indices.shape == (7, N)


@pytest.mark.parametrize(
    "H, N, expected",
    [
        pytest.param(1, 100, 8, id="H1"),
        pytest.param(8, 100, 8, id="H8"),
        pytest.param(16, 100, 4, id="H16"),
        pytest.param(20, 100, 2, id="H20"),
        pytest.param(32, 100, 2, id="H32"),
        pytest.param(33, 100, 1, id="H33"),
        pytest.param(128, 100, 1, id="H128"),
        pytest.param(8, 2**23, 8, id="most-keys"),
        pytest.param(8, 2**23 + 1, 1, id="too-many-keys"),
    ],
)
def test_rows_that_share_a_program(H, N, expected):
    assert config.group_rows(H, N) == expected


def results(call, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out, lse = call(*leaves)
    torch.manual_seed(7)
    grad, lse_grad = (torch.randn(x.shape).bfloat16().to(x) for x in (out, lse))
    alive = torch.isfinite(lse)
    loss = (out * grad).sum() + (torch.where(alive, lse, 0) * lse_grad).sum()
    return [out, torch.where(alive, lse, 0), alive.float(), *torch.autograd.grad(loss, leaves)]


def check(call, tensors):
    expected = results(lambda *t: call("torch", *t), [t.double() for t in tensors])
    for one, other in zip(results(lambda *t: call("triton", *t), tensors), expected, strict=True):
        assert torch.isfinite(one).all()
        # The gradient of the sink is summed from float32 products.
        assert rel_rms(one, other) < (1e-3 if one.ndim == 1 else 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [3, 8, 16, 20, 32], ids="H{}".format)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=kind) for kind in ("picks", "unordered", "ranges", "window")],
)
def test_v4_with_few_heads(H, kind):
    torch.manual_seed(H)
    S, D, M, K = 301, 512, 90, 70
    q, kv, rows = (torch.randn(*n, D).bfloat16().cuda() for n in ((S, H), (S,), (M,)))
    cu = torch.tensor([0, 1, 1, 150, S - 3], dtype=torch.int32, device="cuda")
    indices = torch.rand(S, M).topk(K, 1).indices.int()
    if kind == "picks":
        indices = indices.sort(1).values
    indices[5:9], indices[17, 30:], indices[-3:] = -1, -1, -1
    starts = torch.zeros(S, dtype=torch.int32, device="cuda")
    ends = torch.arange(S, dtype=torch.int32, device="cuda") // 4

    def call(backend, q, kv, sink, *rest):
        return sparse_attention_v4(
            q, kv, rest[0] if rest else None, 0.05, sink,
            indices=indices.cuda() if kind in ("picks", "unordered") else None,
            cmp_ranges=(starts, ends) if kind == "ranges" else None,
            cu_seqlens=cu, return_lse=True, backend=backend,
        )  # fmt: skip

    check(call, [q, kv, torch.randn(H).cuda()] + ([rows] if kind != "window" else []))


@pytest.mark.gpu
@pytest.mark.parametrize("tail", [0, 64], ids=["512", "576"])
def test_picks_with_few_heads(tail):
    torch.manual_seed(tail)
    S, H, N, K = 77, 16, 500, 200
    q, kv = (torch.randn(*n, 512 + tail).bfloat16().cuda() for n in ((S, H), (N,)))
    indices = torch.stack([torch.randperm(N)[:K] for _ in range(S)]).sort(1).values.int().cuda()
    lengths = torch.arange(S, dtype=torch.int32, device="cuda") * 3 % (K + 2)

    def call(backend, q, kv):
        return sparse_attention(
            q, kv, indices, 0.05, d_v=512, topk_length=lengths, return_lse=True, backend=backend
        )

    check(call, [q, kv])


@pytest.mark.gpu
def test_repeatable_rows_do_not_depend_on_their_neighbours():
    torch.manual_seed(0)
    q, kv = torch.randn(40, 16, 512).bfloat16().cuda(), torch.randn(300, 512).bfloat16().cuda()
    indices = torch.stack([torch.randperm(300)[:130] for _ in range(40)]).sort(1).values.int().cuda()

    def call(rows):
        return sparse_attention(q[rows], kv, indices[rows], 0.2, deterministic=True, backend="triton")

    assert_bitwise(call(slice(None))[1:2], call(slice(1, 2)))


@pytest.mark.gpu
@pytest.mark.parametrize("tail", [0, 64], ids=["512", "576"])
def test_what_rows_without_keys_hold_reaches_no_neighbour(tail):
    """Padding is whatever was in memory. Its gradient is 0, and that of the rows and keys around it as without it."""
    torch.manual_seed(tail)
    S, H, N, K = 45, 16, 120, 70
    q, kv = (torch.randn(*n, 512 + tail).bfloat16().cuda() for n in ((S, H), (N,)))
    grad, sink = torch.randn(S, H, 512).bfloat16().cuda(), torch.randn(H).cuda()
    indices = torch.stack([torch.randperm(N)[:K] for _ in range(S)]).sort(1).values.int().cuda()
    padding = [1, 6, 7, S - 1]
    indices[padding] = -1
    q[padding], grad[padding] = 0, 0

    def call():
        leaves = [t.clone().requires_grad_() for t in (q, kv, sink)]
        out = sparse_attention(*leaves[:2], indices, 0.05, d_v=512, attn_sink=leaves[2], backend="triton")
        return [out, *torch.autograd.grad(out, leaves, grad)]

    clean = call()
    q[padding], grad[padding] = float("nan"), float("nan")
    for one, other in zip(call(), clean, strict=True):
        assert torch.isfinite(one).all()
        # Atomics come in any order.
        assert rel_rms(one, other) < 1e-3
    assert not clean[1][padding].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["picks", "ranges"])
def test_lists_are_united_in_bounded_pieces(monkeypatch, kind):
    from vime_kernels.ops.sparse_attention import gluon_few

    torch.manual_seed(5)
    S, H, M, K = 203, 16, 90, 70
    q, kv, rows = (torch.randn(*n, 512).bfloat16().cuda() for n in ((S, H), (S,), (M,)))
    indices = torch.rand(S, M, device="cuda").topk(K, 1).indices.sort(1).values.int()
    ends = torch.arange(S, dtype=torch.int32, device="cuda") // 3
    sizes = []

    def counted(*args):
        united = unite(*args)
        sizes.append(4 * united.indices.numel())
        return united

    monkeypatch.setattr(gluon_few, "unite", counted)
    monkeypatch.setattr(gluon_few, "WORDS_BYTES", 2**15)

    def call(backend, q, kv, rows):
        return sparse_attention_v4(
            q, kv, rows, 0.05, None, indices=indices if kind == "picks" else None,
            cmp_ranges=(torch.zeros_like(ends), ends) if kind == "ranges" else None, return_lse=True, backend=backend,
        )  # fmt: skip

    check(call, [q, kv, rows])
    assert len(sizes) > 2
    assert max(sizes) <= 2**15
