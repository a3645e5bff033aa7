# SPDX-License-Identifier: Apache-2.0
"""The streams collapsed after the last layer in one pass over them, forward, for Hopper.

The weights of a token are sums over all its channels, and then the channels are needed again. A program has some
channels of all streams, and two roles. The first multiplies the tokens that pass in shared memory by rows of fn that
it keeps in registers, and sends its part of the sums to the programs with the other channels. The second brings tokens
and collapses those whose sums are complete: a program that waits for another keeps adding up what it has.

The products are the tensor core's. fn is cut into three bfloat16 terms, as in `triton_project`; the squares of the
tokens are the diagonal of a product. Takes what `config.one_pass` admits and leaves the rest to `triton_head`;
the gradient is in `gluon_head_bwd`. The order of the sums over channels does not depend on the other tokens.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vime_kernels.ops.hyper_connection import config
from vime_kernels.ops.hyper_connection.gluon_exchange import WORDS, axes, receive, room, send, tile_words

BLOCK_T = gl.constexpr(8)  # tokens of a tile, the columns of a product
SHARES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def _place(T, SPLITS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The program's part of a token, its group of programs, the number of groups, and tiles of this one."""
    part, group, groups = gl.program_id(0) % SPLITS, gl.program_id(0) // SPLITS, gl.num_programs(0) // SPLITS
    return part, group, groups, (gl.cdiv(T, BLOCK_T) - group + groups - 1) // groups


@gluon.jit
def _terms(  # type: ignore[no-untyped-def]
    fn,
    part,
    LEFT: gl.constexpr,
    n: gl.constexpr,
    C: gl.constexpr,
    BLOCK_C: gl.constexpr,
    CHUNKS: gl.constexpr,
):
    """Left operand [CHUNKS, 16, n BLOCK_C / CHUNKS]: first, second and third terms of n rows of fn, and zeros."""
    K: gl.constexpr = n * BLOCK_C // CHUNKS
    chunk, row, k = axes(LEFT, CHUNKS, 16, K)
    at = chunk * K + k
    c = part * BLOCK_C + at % BLOCK_C
    whole = gl.load(fn + (row % n) * (n * C) + at // BLOCK_C * C + c, mask=c < C, other=0.0)
    first = whole.to(gl.bfloat16)
    rest = whole - first.to(gl.float32)
    second = rest.to(gl.bfloat16)
    third = (rest - second.to(gl.float32)).to(gl.bfloat16)
    third = gl.where(row < 3 * n, third, gl.zeros_like(third))
    return gl.where(row < n, first, gl.where(row < 2 * n, second, third))


@gluon.jit
def _add_up(  # type: ignore[no-untyped-def]
    fn, words, T, tiles, full, shares, square_shares,
    n: gl.constexpr, C: gl.constexpr, SPLITS: gl.constexpr, BLOCK_C: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The first role: this program's part of the sums. A warp has two chunks of the channels, each with its own sum."""
    CHUNKS: gl.constexpr = 2 * WARPS
    K: gl.constexpr = n * BLOCK_C // CHUNKS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    ADD: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 4, 8], [WARPS, 1, 1], [2, 1, 0])
    part, group, _, mine = _place(T, SPLITS)
    f = _terms(fn, part, LEFT, n, C, BLOCK_C, CHUNKS)
    zero = gl.zeros([CHUNKS, 16, BLOCK_T], gl.float32, MMA)
    _, row, column = axes(MMA, CHUNKS, 16, BLOCK_T)
    t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, gl.SliceLayout(2, ADD)))[:, None]
    ours = (part * BLOCK_T + t) * WORDS
    w = gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(2, ADD)))[None, :]
    last = gl.arange(0, 1, layout=gl.SliceLayout(0, gl.SliceLayout(2, ADD)))[None, :] + n
    for k in range(mine):
        mbarrier.wait(full.index(k % STAGES), (k // STAGES) & 1)
        x = tiles.index(k % STAGES).reshape([BLOCK_T, CHUNKS, K]).permute((1, 2, 0)).load(RIGHT)
        dots = gl.sum(gl.reshape(mma_v2(f, x, zero), [2, WARPS, 4, n, BLOCK_T]), 0)
        # x again, as the upper rows of a left operand.
        left = gl.permute(x, (0, 2, 1))
        left = gl.permute(gl.join(left, gl.zeros_like(left)), (0, 3, 1, 2))
        left = gl.convert_layout(gl.reshape(left, [CHUNKS, 16, K]), LEFT)
        squares = gl.where(row == column, mma_v2(left, x, zero), 0.0)
        squares = gl.sum(gl.sum(gl.reshape(squares, [2, WARPS, 16, BLOCK_T]), 0), 1)
        slot = k % 2  # a warp may still read the shares of the tile before
        shares.index(slot).store(gl.permute(gl.sum(dots, 1), (2, 1, 0)))
        square_shares.index(slot).store(gl.reshape(gl.permute(squares, (1, 0)), [BLOCK_T, 1, WARPS]))
        gl.thread_barrier()
        word = tile_words(words, group, k, 2 * STAGES, SPLITS, BLOCK_T) + ours
        send(word + w, gl.sum(shares.index(slot).load(ADD), 2), k)
        send(word + last, gl.sum(square_shares.index(slot).load(ADD), 2), k)


@gluon.jit
def _bring(x_desc, tiles, full, k, first, channel, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    mbarrier.expect(full.index(k % STAGES), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        x_desc, [first, 0, channel], full.index(k % STAGES), tiles.index(k % STAGES)
    )


@gluon.jit
def _collapse(  # type: ignore[no-untyped-def]
    x_desc, scale, base, out, m, inverse_rms, weights, words, T, eps, norm_eps, tiles, full,
    n: gl.constexpr, C: gl.constexpr, SPLITS: gl.constexpr, BLOCK_C: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The second role: brings tiles, and collapses them when all parts of their sums are there. A warp has a token."""
    TILE: gl.constexpr = gl.BlockedLayout([1, n, 8], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    PARTS: gl.constexpr = 8 if SPLITS <= 8 else 16
    GATHER: gl.constexpr = gl.BlockedLayout([1, 1, 1], [8, 1, 4], [1, WARPS, 1], [2, 1, 0])
    SUMS: gl.constexpr = gl.SliceLayout(0, GATHER)
    part, group, groups, mine = _place(T, SPLITS)
    channel = part * BLOCK_C
    for k in gl.static_range(STAGES):
        if k < mine:
            _bring(x_desc, tiles, full, k, (group + k * groups) * BLOCK_T, channel, STAGES)
    p, pt, pw = axes(GATHER, PARTS, BLOCK_T, n)
    theirs = gl.minimum(p, SPLITS - 1) * (BLOCK_T * WORDS) + pt * WORDS
    t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, SUMS))[:, None]
    w = gl.arange(0, n, layout=gl.SliceLayout(0, SUMS))[None, :]
    gain, bias = gl.load(scale), gl.load(base + w)
    out_t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, gl.SliceLayout(1, TILE)))[:, None]
    c = gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, gl.SliceLayout(1, TILE)))[None, :]
    word = tile_words(words, group, 0, 2 * STAGES, SPLITS, BLOCK_T) + theirs
    early, early_square = gl.load(word + pw, volatile=True), gl.load(word + n, volatile=True)
    for k in range(mine):
        dot = gl.sum(gl.where(p < SPLITS, receive(word + pw, early, k), 0.0), 0)
        square = gl.sum(gl.where(p < SPLITS, receive(word + n, early_square, k), 0.0), 0)
        word = tile_words(words, group, k + 1, 2 * STAGES, SPLITS, BLOCK_T) + theirs
        early, early_square = gl.load(word + pw, volatile=True), gl.load(word + n, volatile=True)
        scale_t = gl.rsqrt(square / (n * C) + norm_eps)
        mix = dot * scale_t
        weight = 1.0 / (1.0 + gl.exp(-(mix * gain + bias))) + eps
        first = (group + k * groups) * BLOCK_T
        live = (part == 0) & (first + t < T)
        gl.store(m + (first + t) * n + w, mix, mask=live)
        gl.store(weights + (first + t) * n + w, weight, mask=live)
        gl.store(inverse_rms + first + t, scale_t, mask=live)
        mbarrier.wait(full.index(k % STAGES), (k // STAGES) & 1)
        x = tiles.index(k % STAGES).load(TILE).to(gl.float32)
        weight = gl.convert_layout(weight, gl.SliceLayout(2, TILE))
        total = gl.sum(x * gl.expand_dims(weight, 2), 1)
        target = out + first.to(gl.int64) * C + channel + (out_t * C + c)
        gl.store(target, total.to(gl.bfloat16), mask=(first + out_t < T) & (channel + c < C))
        # The first role has read the tile too: or its words would not be here.
        gl.thread_barrier()
        if k + STAGES < mine:
            _bring(
                x_desc, tiles, full, k + STAGES, (group + (k + STAGES) * groups) * BLOCK_T, channel, STAGES
            )


@gluon.jit(do_not_specialize=["T"])
def _head_kernel(  # type: ignore[no-untyped-def]
    x_desc, fn, scale, base, out, m, inverse_rms, weights, words, T, eps, norm_eps,
    n: gl.constexpr, C: gl.constexpr, SPLITS: gl.constexpr, BLOCK_C: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers of one program, then its roles. A place of the words is free after 2 STAGES tiles.

    For a program adds up tile k when it has collapsed k - STAGES, for which all others have sent their words; and they
    did that when they had collapsed k - 2 STAGES.
    """
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, n, BLOCK_C], x_desc.layout)
    shares = gl.allocate_shared_memory(gl.float32, [2, BLOCK_T, n, WARPS], SHARES)
    square_shares = gl.allocate_shared_memory(gl.float32, [2, BLOCK_T, 1, WARPS], SHARES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_add_up, (
                fn, words, T, tiles, full, shares, square_shares, n, C, SPLITS, BLOCK_C, STAGES, WARPS,
            )),
            (_collapse, (
                x_desc, scale, base, out, m, inverse_rms, weights, words, T, eps, norm_eps, tiles, full,
                n, C, SPLITS, BLOCK_C, STAGES, WARPS,
            )),
        ],
        [WARPS], [REGISTERS],
    )  # fmt: skip


def forward(
    X: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float, norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `triton_head.mhc_head`."""
    T, n, C = X.shape
    splits, groups = config.head_groups(X, config.HEAD_PROGRAMS, BLOCK_T.value)
    out, m = X.new_empty(T, C), fn.new_empty(T, n)
    inverse_rms, weights = fn.new_empty(T), fn.new_empty(T, n)
    tile = [BLOCK_T.value, n, config.HEAD_CHANNELS]
    _head_kernel[(groups * splits,)](
        TensorDescriptor.from_tensor(X, tile, gl.NVMMASharedLayout(128, 16, 3)),
        fn, scale, base, out, m, inverse_rms, weights,
        room(groups, 2 * config.HEAD_STAGES, splits, BLOCK_T.value, X.device), T, eps, norm_eps,
        n=n, C=C, SPLITS=splits, BLOCK_C=config.HEAD_CHANNELS, STAGES=config.HEAD_STAGES,
        WARPS=config.HEAD_WARPS, REGISTERS=config.HEAD_COLLAPSE_REGISTERS,
        num_warps=config.HEAD_WARPS, maxnreg=config.HEAD_REGISTERS, launch_cooperative_grid=True,
    )  # fmt: skip
    return out, m, inverse_rms, weights
