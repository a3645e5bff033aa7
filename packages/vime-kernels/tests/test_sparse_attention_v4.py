# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 attention against a dense masked softmax built row by row, and against the list form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from vime_kernels import _rows
from vime_kernels.dsa import causal_ranges, gated_pool, sparse_attention, sparse_attention_v4
from vime_kernels.testing import assert_bitwise, causal_picks, cu_seqlens_of, randn, rel_rms

INF = float("inf")


def inputs(T=11, M=3, H=2, D=4, dtype=torch.float64, grad=False):
    q = randn(T, H, D, seed=0, dtype=dtype, grad=grad)
    raw, compressed = (randn(rows, D, seed=s, dtype=dtype, grad=grad) for s, rows in ((1, T), (2, M)))
    sink_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return q, raw, compressed, randn(H, seed=3, dtype=sink_dtype, grad=grad)


def by_masks(q, raw, compressed, scale, sink, visible_raw, visible_compressed):
    """One row at a time; visible_*[t] lists the rows that query t sees."""
    out = []
    for t in range(len(q)):
        keys = torch.cat([raw[visible_raw[t]], compressed[visible_compressed[t]]])
        logits = torch.cat([q[t] @ keys.T * scale, sink[:, None]], 1)
        out.append(logits.softmax(1)[:, :-1] @ keys)
    return torch.stack(out)


def window_of(lengths, window):
    seen, start = [], 0
    for length in lengths:
        seen += [list(range(max(start, start + p - window + 1), start + p + 1)) for p in range(length)]
        start += length
    return seen


LENGTHS = {"one": [11], "packed": [3, 0, 7, 1]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("window", [1, 3, 128])
@pytest.mark.parametrize("kind", ["window-only", "indices", "ranges"])
def test_equals_dense_rows(lengths, window, kind):
    q, raw, compressed, sink = inputs()
    seen_raw, seen_compressed, arguments = window_of(lengths, window), [[]] * 11, {}
    cu = cu_seqlens_of(lengths)
    if kind == "indices":
        picks = torch.randint(-1, 5, (11, 4), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        arguments = {"indices": picks}  # with duplicates, -1, and 3 and 4 = out of range
        seen_compressed = [[i for i in row if 0 <= i < 3] for row in picks.tolist()]
    elif kind == "ranges":
        starts, ends = causal_ranges(cu, ratio=3)
        arguments = {"cmp_ranges": (starts, ends)}
        seen_compressed = [list(range(s, e)) for s, e in zip(starts.tolist(), ends.tolist(), strict=True)]
    out = sparse_attention_v4(
        q,
        raw,
        compressed if arguments else None,
        0.5,
        sink,
        window=window,
        cu_seqlens=None if len(lengths) == 1 else cu,
        **arguments,
    )
    expected = by_masks(q, raw, compressed, 0.5, sink, seen_raw, seen_compressed)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("with_sink", [False, True], ids=["no-sink", "sink"])
def test_is_sparse_attention_on_the_concatenation(with_sink):
    q, raw, compressed, sink = inputs(T=40, M=10, dtype=torch.float32)
    sink = sink if with_sink else None
    picks = causal_picks(40, 10, 3, seed=0, ratio=4)
    window = torch.arange(40, dtype=torch.int32)[:, None] - torch.arange(7, -1, -1, dtype=torch.int32)
    united = torch.cat([window, torch.where(picks < 0, -1, picks + 40)], 1)
    arguments = {"indices": picks, "window": 8, "return_lse": True}
    out, lse = sparse_attention_v4(q, raw, compressed, 0.5, sink, **arguments)
    listed = sparse_attention(q, torch.cat([raw, compressed]), united, 0.5, attn_sink=sink, return_lse=True)
    assert_bitwise(out, listed[0])
    assert_bitwise(lse, listed[1])


@pytest.mark.parametrize("chunk_bytes", [2**28, 1], ids=["one-chunk", "row-chunks"])
@pytest.mark.parametrize("kind", ["window-only", "indices", "ranges"])
def test_gradients(monkeypatch, kind, chunk_bytes):
    monkeypatch.setattr(_rows, "CHUNK_BYTES", chunk_bytes)
    q, raw, compressed, sink = inputs(T=6, M=2, grad=True)
    cu = cu_seqlens_of([4, 2])
    arguments = {
        "window-only": {},
        "indices": {
            "indices": torch.tensor([[-1, 0], [1, 1], [0, 1], [-1, -1], [2, 0], [0, -1]], dtype=torch.int32)
        },
        "ranges": {"cmp_ranges": causal_ranges(cu, ratio=2)},
    }[kind]
    assert gradcheck(
        lambda q, raw, compressed, sink: sparse_attention_v4(
            q,
            raw,
            compressed if arguments else None,
            0.5,
            sink,
            window=3,
            cu_seqlens=cu,
            return_lse=True,
            **arguments,
        ),
        (q, raw, compressed, sink),
        fast_mode=chunk_bytes == 1,  # recomputing every row for every element takes long
    )


@given(st.lists(st.integers(0, 13), min_size=1, max_size=5), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_packed_is_one_call_per_sequence(lengths, window):
    T = sum(lengths)
    q, raw, _, sink = inputs(T=T)
    score, ape = randn(T, 4, seed=5, dtype=torch.float64), randn(2, 4, seed=6, dtype=torch.float64)
    cu = cu_seqlens_of(lengths)
    compressed, _ = gated_pool(raw, score, ape, cu, 2)
    packed = sparse_attention_v4(
        q, raw, compressed, 0.5, sink, cmp_ranges=causal_ranges(cu, ratio=2), window=window, cu_seqlens=cu
    )
    start = 0
    for length in lengths:
        part, own = slice(start, start + length), cu_seqlens_of([length])
        pools, _ = gated_pool(raw[part], score[part], ape, own, 2)
        ranges = causal_ranges(own, ratio=2)
        alone = sparse_attention_v4(q[part], raw[part], pools, 0.5, sink, cmp_ranges=ranges, window=window)
        torch.testing.assert_close(packed[part], alone, rtol=1e-12, atol=1e-13)
        start += length


@pytest.mark.parametrize("order", ["slice", "zigzag", "random"])
def test_local_rows_are_bitwise_rows_of_the_whole(order):
    q, raw, compressed, sink = inputs(T=40, M=10, H=3, D=16, dtype=torch.float32)
    cu = cu_seqlens_of([15, 25])
    picks = causal_picks(40, 10, 3, seed=0, ratio=4)
    whole, lse = sparse_attention_v4(
        q, raw, compressed, 0.5, sink, indices=picks, window=8, cu_seqlens=cu, return_lse=True
    )
    rows = {
        "slice": torch.arange(10, 20),
        "zigzag": torch.cat([torch.arange(5), torch.arange(35, 40)]),
        "random": torch.randperm(40, generator=torch.Generator().manual_seed(0)),
    }[order]
    local, local_lse = sparse_attention_v4(
        q[rows],
        raw,
        compressed,
        0.5,
        sink,
        indices=picks[rows],
        window=8,
        cu_seqlens=cu,
        q_positions=rows.to(torch.int32),
        return_lse=True,
    )
    assert_bitwise(local, whole[rows])
    assert_bitwise(local_lse, lse[rows])


def test_rows_of_no_sequence_are_zero_and_give_no_gradient():
    q, raw, _, sink = inputs(T=6, grad=True)
    out, lse = sparse_attention_v4(q, raw, None, 0.5, sink, cu_seqlens=cu_seqlens_of([4]), return_lse=True)
    assert (out[4:] == 0).all()
    assert (lse[4:] == -INF).all()
    out.sum().backward()
    assert (q.grad[4:] == 0).all()
    assert (raw.grad[4:] == 0).all()
    assert (raw.grad[:4] != 0).any()


def test_ranges_are_clamped_to_the_buffer():
    q, raw, compressed, sink = inputs(T=2)
    wide = (torch.tensor([-5, 2], dtype=torch.int32), torch.tensor([99, 1], dtype=torch.int32))
    exact = (torch.tensor([0, 0], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32))
    outs = [sparse_attention_v4(q, raw, compressed, 0.5, sink, cmp_ranges=r) for r in (wide, exact)]
    assert_bitwise(*outs)


def test_bfloat16():
    q, raw, compressed, sink = inputs(T=40, M=10, D=32, dtype=torch.bfloat16)
    picks = causal_picks(40, 10, 3, seed=0, ratio=4)
    out = sparse_attention_v4(q, raw, compressed, 0.2, sink, indices=picks)
    exact = sparse_attention_v4(
        q.double(), raw.double(), compressed.double(), 0.2, sink.double(), indices=picks
    )
    assert out.dtype == torch.bfloat16
    assert rel_rms(out, exact) < torch.finfo(torch.bfloat16).eps / 2


def test_nothing_compressed_yet():
    q, raw, _, sink = inputs(T=3)
    empty = torch.zeros(0, 4, dtype=torch.float64)
    window_only = sparse_attention_v4(q, raw, None, 0.5, sink)
    none = torch.full((3, 2), -1, dtype=torch.int32)
    zero = torch.zeros(3, dtype=torch.int32)
    torch.testing.assert_close(sparse_attention_v4(q, raw, empty, 0.5, sink, indices=none), window_only)
    assert_bitwise(sparse_attention_v4(q, raw, empty, 0.5, sink, cmp_ranges=(zero, zero)), window_only)
    assert sparse_attention_v4(q[:0], raw[:0], None, 0.5, sink).shape == (0, 2, 4)


@pytest.mark.parametrize("window", [2**31 - 1, 10**12], ids=["int32", "beyond"])
def test_a_window_may_be_any_large_number(window):
    q, raw, _, sink = inputs()
    out = sparse_attention_v4(q, raw, None, 0.7, sink, window=window)
    assert_bitwise(out, sparse_attention_v4(q, raw, None, 0.7, sink, window=len(raw)))
