# SPDX-License-Identifier: Apache-2.0
"""The gradient of the streams that `gluon_head` collapses, in one pass over them, for Hopper.

The gradients of a token's weights are sums over all its channels, and then the channels are needed again. A program
keeps the rows of fn for some channels of all streams in registers, and the tokens that pass in shared memory, until
the programs with their other channels have sent their part of the sums.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from vime_kernels.ops.hyper_connection import config
from vime_kernels.ops.hyper_connection.gluon_exchange import WORDS, axes, receive, room, send, tile_words

# A tile is used so many tiles after its partial sums went out: meanwhile those of its group come in.
LAG = gl.constexpr(1)
# Tiles whose words have a place. A program is at most 2 LAG + 1 tiles ahead of what the slowest of its group has read.
SLOTS = gl.constexpr(4)
PAD = gl.constexpr(16)  # floats behind the gradient of fn: those of base and scale, and the rest of the line
ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
MATRIX = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
CUBE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@triton.constexpr_function
def _tile(tokens: int, n: int, block_c: int, warps: int) -> gl.BlockedLayout:
    """[tokens, n, block_c]: a thread has all tokens and streams of its channels, so that sums over those stay in it."""
    return gl.BlockedLayout([tokens, n, block_c // (32 * warps)], [1, 1, 32], [1, 1, warps], [2, 1, 0])


@triton.constexpr_function
def _copy(block_c: int, warps: int) -> gl.BlockedLayout:
    """The same for copies of 16 bytes."""
    return gl.BlockedLayout([1, 1, 8], [1, 1, 32], [1, 256 * warps // block_c, block_c // 256], [2, 1, 0])


@triton.constexpr_function
def _add(warps: int) -> gl.BlockedLayout:
    """[tokens, n, threads]: a warp adds the shares that the threads have in the sums of a token."""
    return gl.BlockedLayout([1, 1, 4], [1, 4, 8], [warps, 1, 1], [2, 1, 0])


@triton.constexpr_function
def _gather(warps: int) -> gl.BlockedLayout:
    """[PARTS, tokens, n] words: the parts of a number lie in one warp."""
    return gl.BlockedLayout([1, 1, 1], [8, 1, 4], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _inside(t, T, c, C: gl.constexpr, BLOCK_C: gl.constexpr):  # type: ignore[no-untyped-def]
    """Which tokens and channels exist; about channels there is nothing to ask where whole blocks make them up."""
    return (t < T) & (c < C if C % BLOCK_C else c >= 0)


@gluon.jit
def _bring(  # type: ignore[no-untyped-def]
    X, into, first, T, channel, C: gl.constexpr, X_token: gl.constexpr, X_stream: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Starts the copy of a tile of X [tokens, streams, channels], zero outside."""
    t, i, c = axes(_copy(into.shape[2], WARPS), into.shape[0], into.shape[1], into.shape[2])
    # Strides are constants, so that what differs between the copies of a thread is in the instructions.
    source = X + first.to(gl.int64) * X_token + channel + (t * X_token + i * X_stream + c)
    live = _inside(first + t, T, channel + c, C, into.shape[2])
    async_copy.async_copy_global_to_shared(into, source, mask=live)


@gluon.jit(do_not_specialize=["T"])
def _head_bwd_kernel(  # type: ignore[no-untyped-def]
    grad, X, fn, scale, base, m, inverse_rms, weights, dX, partial, words, T,
    n: gl.constexpr, C: gl.constexpr, X_token: gl.constexpr, SPLITS: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_C: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """dX; and the gradients of fn, base and scale, one behind the other, summed over the tokens of a group."""
    THREADS: gl.constexpr = 32 * WARPS
    AHEAD: gl.constexpr = STAGES - LAG - 1
    TILE: gl.constexpr = _tile(BLOCK_T, n, BLOCK_C, WARPS)
    FN: gl.constexpr = _tile(n, n, BLOCK_C, WARPS)
    TOKEN: gl.constexpr = gl.SliceLayout(0, FN)
    ADD: gl.constexpr = _add(WARPS)
    PARTS: gl.constexpr = 8 if SPLITS <= 8 else 16
    SUMS: gl.constexpr = gl.SliceLayout(0, _gather(WARPS))
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, n, BLOCK_C], CUBE)
    rows = tiles._reinterpret(gl.bfloat16, [STAGES * BLOCK_T, n, BLOCK_C], MATRIX)
    grads = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, 1, BLOCK_C], CUBE)
    grad_rows = grads._reinterpret(gl.bfloat16, [STAGES * BLOCK_T, 1, BLOCK_C], MATRIX)
    shares = gl.allocate_shared_memory(gl.float32, [BLOCK_T, n, THREADS], CUBE)
    weights_s = gl.allocate_shared_memory(gl.float32, [BLOCK_T, n], MATRIX)
    weights_row = weights_s._reinterpret(gl.float32, [BLOCK_T, n], ROWS)
    dp_s = gl.allocate_shared_memory(gl.float32, [BLOCK_T, n], MATRIX)
    dp_row = dp_s._reinterpret(gl.float32, [BLOCK_T, n], ROWS)
    shrink_s = gl.allocate_shared_memory(gl.float32, [BLOCK_T, 1], MATRIX)
    shrink_row = shrink_s._reinterpret(gl.float32, [BLOCK_T, 1], ROWS)

    part, group, groups = gl.program_id(0) % SPLITS, gl.program_id(0) // SPLITS, gl.num_programs(0) // SPLITS
    mine = (gl.cdiv(T, BLOCK_T) - group + groups - 1) // groups
    channel = part * BLOCK_C
    fw, fi, fc = axes(FN, n, n, BLOCK_C)
    at = (fw * n + fi) * C + channel + fc
    f = gl.load(fn + at, mask=channel + fc < C, other=0.0)
    total = gl.zeros([n, n, BLOCK_C], gl.float32, FN)
    i = gl.arange(0, n, layout=gl.SliceLayout(1, TOKEN))[:, None]
    c = channel + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, TOKEN))[None, :]
    p, pt, pw = axes(_gather(WARPS), PARTS, BLOCK_T, n)
    theirs = gl.minimum(p, SPLITS - 1) * (BLOCK_T * WORDS) + pt * WORDS + pw
    t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, SUMS))[:, None]
    w = gl.arange(0, n, layout=gl.SliceLayout(0, SUMS))[None, :]
    gain, bias = gl.load(scale), gl.load(base + w)
    dbase = gl.zeros([BLOCK_T, n], gl.float32, SUMS)
    dscale = gl.zeros([BLOCK_T, n], gl.float32, SUMS)
    our_t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, gl.SliceLayout(2, ADD)))[:, None]
    our_w = gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(2, ADD)))[None, :]
    ours = (part * BLOCK_T + our_t) * WORDS + our_w

    for a in gl.static_range(AHEAD):
        first = (group + a * groups) * BLOCK_T
        _bring(X, tiles.index(a), first, T, channel, C, X_token, C, WARPS)
        _bring(grad, grads.index(a), first, T, channel, C, C, 0, WARPS)
        async_copy.commit_group()
    for k in range(mine + LAG):
        async_copy.wait_group(AHEAD - 1)
        gl.thread_barrier()
        first = (group + (k + AHEAD) * groups) * BLOCK_T
        _bring(X, tiles.index((k + AHEAD) % STAGES), first, T, channel, C, X_token, C, WARPS)
        _bring(grad, grads.index((k + AHEAD) % STAGES), first, T, channel, C, C, 0, WARPS)
        async_copy.commit_group()
        old = k - LAG
        word = tile_words(words, group, gl.maximum(old, 0), SLOTS, SPLITS, BLOCK_T) + theirs
        early = gl.load(word, volatile=True)
        first = (group + gl.maximum(old, 0) * groups) * BLOCK_T
        live = first + t < T
        mix = gl.load(m + (first + t) * n + w, mask=live, other=0.0)
        weight = gl.load(weights + (first + t) * n + w, mask=live, other=0.0)
        scale_t = gl.load(inverse_rms + first + t, mask=live, other=0.0)
        if k < mine:
            x = tiles.index(k % STAGES).load(TILE).to(gl.float32)
            g = grads.index(k % STAGES).load(TILE).to(gl.float32)
            share = gl.sum(gl.reshape(x * g, [BLOCK_T, n, THREADS, BLOCK_C // THREADS]), 3)
            shares.store(share)
            gl.thread_barrier()
            word_out = tile_words(words, group, k, SLOTS, SPLITS, BLOCK_T) + ours
            send(word_out, gl.sum(shares.load(ADD), 2), k)
        if k >= LAG:
            dweight = gl.sum(gl.where(p < SPLITS, receive(word, early, old), 0.0), 0)
            s = 1.0 / (1.0 + gl.exp(-(mix * gain + bias)))
            dlogit = gl.where(live, dweight * s * (1 - s), 0.0)
            dbase += dlogit
            dscale += dlogit * mix
            dm = dlogit * gain
            weights_s.store(weight)
            dp_s.store(dm * scale_t)
            shrink_s.store(gl.expand_dims(gl.sum(dm * mix, 1), 1) * scale_t * scale_t * (-1.0 / (n * C)))
            gl.thread_barrier()
            target = dX + first.to(gl.int64) * (n * C)
            for row in gl.static_range(BLOCK_T):
                at_row = old % STAGES * BLOCK_T + row
                x = rows.index(at_row).load(TOKEN).to(gl.float32)
                g = grad_rows.index(at_row).load(TOKEN).to(gl.float32)
                weight_i = gl.expand_dims(weights_row.index(row).load(gl.SliceLayout(1, TOKEN)), 1)
                shrink = gl.expand_dims(shrink_row.index(row).load(gl.SliceLayout(1, TOKEN)), 1)
                dp = dp_row.index(row).load(gl.SliceLayout(1, gl.SliceLayout(2, FN)))
                dp = gl.expand_dims(gl.expand_dims(dp, 1), 2)
                dx = weight_i * g + shrink * x + gl.sum(f * dp, 0)
                total += dp * gl.expand_dims(x, 0)
                at_row = target + ((row * n + i) * C + c)
                gl.store(at_row, dx.to(gl.bfloat16), mask=_inside(first + row, T, c, C, BLOCK_C))
    async_copy.wait_group(0)
    partial += group.to(gl.int64) * (n * n * C + PAD)
    gl.store(partial + at, total, mask=channel + fc < C)
    if part == 0:
        sums = partial + n * n * C
        gl.store(sums + gl.arange(0, n, layout=gl.SliceLayout(0, SUMS)), gl.sum(dbase, 0))
        gl.store(sums + n, gl.sum(gl.sum(dscale, 0), 0))


@triton.jit(do_not_specialize=["R"])
def _sum_kernel(partial, total, R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of the R rows of a matrix of N columns."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    rows_RN = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for first in range(0, R, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)[:, None]
        rows_RN += tl.load(partial + row.to(tl.int64) * N + column, mask=(row < R) & (column < N), other=0.0)
    tl.store(total + column, tl.sum(rows_RN, 0, keep_dims=True), mask=column < N)


def _sum_rows(partial: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension of a few dozen float32 partial sums, [R, N], in fixed order."""
    R, N = partial.shape
    total = partial.new_empty(N)
    _sum_kernel[(triton.cdiv(N, 128),)](partial, total, R, N, BLOCK_R=32, BLOCK_N=128)
    return total


def backward(
    grad: torch.Tensor, X: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    m: torch.Tensor, inverse_rms: torch.Tensor, weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `triton_head.mhc_head_bwd`."""
    T, n, C = X.shape
    tokens = config.HEAD_BWD_TOKENS
    splits, groups = config.head_groups(X, config.HEAD_BWD_PROGRAMS, tokens)
    dX, partial = X.new_empty(T, n, C), fn.new_empty(groups, n * n * C + PAD.value)
    _head_bwd_kernel[(groups * splits,)](
        grad, X, fn, scale, base, m, inverse_rms, weights, dX, partial,
        room(groups, SLOTS.value, splits, tokens, X.device), T, n=n, C=C, X_token=X.stride(0), SPLITS=splits,
        BLOCK_T=tokens, BLOCK_C=config.HEAD_CHANNELS, STAGES=config.HEAD_BWD_STAGES,
        WARPS=config.HEAD_BWD_WARPS, num_warps=config.HEAD_BWD_WARPS, launch_cooperative_grid=True,
    )  # fmt: skip
    total = _sum_rows(partial)
    dfn, sums = total[: n * n * C].view(n, n * C), total[n * n * C :][: n + 1]
    return dX, dfn, sums.clone()  # results of an operation must not share memory
