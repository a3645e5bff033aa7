# SPDX-License-Identifier: Apache-2.0
"""The streams collapsed after the last layer in one pass over them, forward and backward, for Hopper.

The weights of a token, or their gradient, are sums over all its channels, and then the channels are needed again. A
program keeps the rows of fn for some channels of all streams in registers, and the tokens that pass in shared memory,
until the programs with their other channels have sent their part of the sums. Takes what `config.one_pass` admits and
leaves the rest to `triton_head`. The order of the sums over channels does not depend on the other tokens.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from vime_kernels.ops.hyper_connection import config
from vime_kernels.ops.hyper_connection.gluon_exchange import LAG, WORDS, receive, room, send, tile_words
from vime_kernels.ops.hyper_connection.triton_head import sum_rows

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
def _axes(ROW: gl.constexpr, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):  # type: ignore[no-untyped-def]
    """The three coordinates of a tensor of that layout."""
    a = gl.arange(0, A, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROW)))[:, None, None]
    b = gl.arange(0, B, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROW)))[None, :, None]
    c = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROW)))[None, None, :]
    return a, b, c


@gluon.jit
def _bring(X, into, first, T, C, channel, X_token, X_stream, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Starts the copy of a tile of X [tokens, streams, channels], zero outside."""
    t, i, c = _axes(_copy(into.shape[2], WARPS), into.shape[0], into.shape[1], into.shape[2])
    source = X + (first + t).to(gl.int64) * X_token + i * X_stream + channel + c
    async_copy.async_copy_global_to_shared(into, source, mask=(first + t < T) & (channel + c < C))


@gluon.jit
def _share(f, x, THREADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """What each thread has of one dot product of every token, [tokens, THREADS]."""
    products = gl.sum(gl.expand_dims(f, 0) * x, 1)
    return gl.sum(gl.reshape(products, [x.shape[0], THREADS, x.shape[2] // THREADS]), 2)


@gluon.jit(do_not_specialize=["T"])
def _head_kernel(  # type: ignore[no-untyped-def]
    X, fn, scale, base, out, m, inverse_rms, weights, words, T, C, X_token, X_stream, eps, norm_eps,
    n: gl.constexpr, SPLITS: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_C: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    THREADS: gl.constexpr = 32 * WARPS
    AHEAD: gl.constexpr = STAGES - LAG - 1
    TILE: gl.constexpr = _tile(BLOCK_T, n, BLOCK_C, WARPS)
    TOKEN: gl.constexpr = gl.SliceLayout(0, TILE)
    ADD: gl.constexpr = _add(WARPS)
    ADD_SQUARES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    PARTS: gl.constexpr = 8 if SPLITS <= 8 else 16
    SUMS: gl.constexpr = gl.SliceLayout(0, _gather(WARPS))
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, n, BLOCK_C], CUBE)
    rows = tiles._reinterpret(gl.bfloat16, [STAGES * BLOCK_T, n, BLOCK_C], MATRIX)
    shares = gl.allocate_shared_memory(gl.float32, [BLOCK_T, n, THREADS], CUBE)
    square_shares = gl.allocate_shared_memory(gl.float32, [BLOCK_T, THREADS], MATRIX)
    weights_s = gl.allocate_shared_memory(gl.float32, [BLOCK_T, n], MATRIX)
    weights_row = weights_s._reinterpret(gl.float32, [BLOCK_T, n], ROWS)

    part, group, groups = gl.program_id(0) % SPLITS, gl.program_id(0) // SPLITS, gl.num_programs(0) // SPLITS
    mine = (gl.cdiv(T, BLOCK_T) - group + groups - 1) // groups  # tiles: this one, then every so many
    channel = part * BLOCK_C
    i = gl.arange(0, n, layout=gl.SliceLayout(1, TOKEN))[:, None]
    c = channel + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, TOKEN))[None, :]
    f0 = gl.load(fn + i * C + c, mask=c < C, other=0.0)
    f1 = gl.load(fn + (n + i) * C + c, mask=c < C, other=0.0)
    f2 = gl.load(fn + (2 * n + i) * C + c, mask=c < C, other=0.0)
    f3 = gl.load(fn + (3 * n + i) * C + c, mask=c < C, other=0.0)
    c = channel + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, TOKEN))
    p, pt, pw = _axes(_gather(WARPS), PARTS, BLOCK_T, n)
    theirs = gl.minimum(p, SPLITS - 1) * (BLOCK_T * WORDS) + pt * WORDS
    t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, SUMS))[:, None]
    w = gl.arange(0, n, layout=gl.SliceLayout(0, SUMS))[None, :]
    gain, bias = gl.load(scale), gl.load(base + w)
    our_t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, gl.SliceLayout(2, ADD)))[:, None]
    ours = (part * BLOCK_T + our_t) * WORDS + gl.arange(
        0, n, layout=gl.SliceLayout(0, gl.SliceLayout(2, ADD))
    )[None, :]
    ours_square = (part * BLOCK_T + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, ADD_SQUARES))) * WORDS + n

    for a in gl.static_range(AHEAD):
        first = (group + a * groups) * BLOCK_T
        _bring(X, tiles.index(a), first, T, C, channel, X_token, X_stream, WARPS)
        async_copy.commit_group()
    for k in range(mine + LAG):
        async_copy.wait_group(AHEAD - 1)
        gl.thread_barrier()
        first = (group + (k + AHEAD) * groups) * BLOCK_T
        _bring(X, tiles.index((k + AHEAD) % STAGES), first, T, C, channel, X_token, X_stream, WARPS)
        async_copy.commit_group()
        old = k - LAG
        word = tile_words(words, group, gl.maximum(old, 0), SPLITS, BLOCK_T) + theirs
        early = gl.load(word + pw, volatile=True)
        early_square = gl.load(word + n, volatile=True)
        if k < mine:
            x = tiles.index(k % STAGES).load(TILE).to(gl.float32)
            share = gl.join(
                gl.join(_share(f0, x, THREADS), _share(f1, x, THREADS)),
                gl.join(_share(f2, x, THREADS), _share(f3, x, THREADS)),
            )
            shares.store(gl.reshape(gl.permute(share, (0, 3, 2, 1)), [BLOCK_T, n, THREADS]))
            square_shares.store(
                gl.sum(gl.reshape(gl.sum(x * x, 1), [BLOCK_T, THREADS, BLOCK_C // THREADS]), 2)
            )
            gl.thread_barrier()
            word_out = tile_words(words, group, k, SPLITS, BLOCK_T)
            send(word_out + ours, gl.sum(shares.load(ADD), 2), k)
            send(word_out + ours_square, gl.sum(square_shares.load(ADD_SQUARES), 1), k)
        if k >= LAG:
            dot = gl.sum(gl.where(p < SPLITS, receive(word + pw, early, old), 0.0), 0)
            square = gl.sum(gl.where(p < SPLITS, receive(word + n, early_square, old), 0.0), 0)
            scale_t = gl.rsqrt(square / (n * C) + norm_eps)
            mix = dot * scale_t
            weight = 1.0 / (1.0 + gl.exp(-(mix * gain + bias))) + eps
            weights_s.store(weight)
            first = (group + old * groups) * BLOCK_T
            live = (part == 0) & (first + t < T)
            gl.store(m + (first + t) * n + w, mix, mask=live)
            gl.store(weights + (first + t) * n + w, weight, mask=live)
            gl.store(inverse_rms + first + t, scale_t, mask=live)
            gl.thread_barrier()
            for s in gl.static_range(BLOCK_T):
                x = rows.index(old % STAGES * BLOCK_T + s).load(TOKEN).to(gl.float32)
                weight_i = weights_row.index(s).load(gl.SliceLayout(1, TOKEN))
                total = gl.sum(x * gl.expand_dims(weight_i, 1), 0)
                target = out + (first + s).to(gl.int64) * C + c
                gl.store(target, total.to(gl.bfloat16), mask=(c < C) & (first + s < T))
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["T"])
def _head_bwd_kernel(  # type: ignore[no-untyped-def]
    grad, X, fn, scale, base, m, inverse_rms, weights, dX, partial, words, T, C, X_token, X_stream,
    n: gl.constexpr, SPLITS: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_C: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
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
    fw, fi, fc = _axes(FN, n, n, BLOCK_C)
    at = (fw * n + fi) * C + channel + fc
    f = gl.load(fn + at, mask=channel + fc < C, other=0.0)
    total = gl.zeros([n, n, BLOCK_C], gl.float32, FN)
    i = gl.arange(0, n, layout=gl.SliceLayout(1, TOKEN))[:, None]
    c = channel + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, TOKEN))[None, :]
    p, pt, pw = _axes(_gather(WARPS), PARTS, BLOCK_T, n)
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
        _bring(X, tiles.index(a), first, T, C, channel, X_token, X_stream, WARPS)
        _bring(grad, grads.index(a), first, T, C, channel, C, 0, WARPS)
        async_copy.commit_group()
    for k in range(mine + LAG):
        async_copy.wait_group(AHEAD - 1)
        gl.thread_barrier()
        first = (group + (k + AHEAD) * groups) * BLOCK_T
        _bring(X, tiles.index((k + AHEAD) % STAGES), first, T, C, channel, X_token, X_stream, WARPS)
        _bring(grad, grads.index((k + AHEAD) % STAGES), first, T, C, channel, C, 0, WARPS)
        async_copy.commit_group()
        old = k - LAG
        word = tile_words(words, group, gl.maximum(old, 0), SPLITS, BLOCK_T) + theirs
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
            word_out = tile_words(words, group, k, SPLITS, BLOCK_T) + ours
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
                target = dX + ((first + row).to(gl.int64) * n + i) * C + c
                gl.store(target, dx.to(gl.bfloat16), mask=(c < C) & (first + row < T))
    async_copy.wait_group(0)
    partial += group.to(gl.int64) * (n * n * C + PAD)
    gl.store(partial + at, total, mask=channel + fc < C)
    if part == 0:
        sums = partial + n * n * C
        gl.store(sums + gl.arange(0, n, layout=gl.SliceLayout(0, SUMS)), gl.sum(dbase, 0))
        gl.store(sums + n, gl.sum(gl.sum(dscale, 0), 0))


def _groups(X: torch.Tensor, per_multiprocessor: int) -> tuple[int, int]:
    """Programs that share a token, and how many such groups run at the same time."""
    T, _, C = X.shape
    splits = triton.cdiv(C, config.HEAD_CHANNELS)
    programs = per_multiprocessor * torch.cuda.get_device_properties(X.device).multi_processor_count
    return splits, min(programs // splits, triton.cdiv(T, config.HEAD_TOKENS))


def forward(
    X: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float, norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `triton_head.mhc_head`."""
    T, n, C = X.shape
    splits, groups = _groups(X, config.HEAD_PROGRAMS)
    out, m = X.new_empty(T, C), fn.new_empty(T, n)
    inverse_rms, weights = fn.new_empty(T), fn.new_empty(T, n)
    _head_kernel[(groups * splits,)](
        X, fn, scale, base, out, m, inverse_rms, weights, room(groups, splits, config.HEAD_TOKENS, X.device),
        T, C, X.stride(0), X.stride(1), eps, norm_eps, n=n, SPLITS=splits, BLOCK_T=config.HEAD_TOKENS,
        BLOCK_C=config.HEAD_CHANNELS, STAGES=config.HEAD_STAGES, WARPS=config.HEAD_WARPS,
        num_warps=config.HEAD_WARPS, maxnreg=config.HEAD_REGISTERS, launch_cooperative_grid=True,
    )  # fmt: skip
    return out, m, inverse_rms, weights


def backward(
    grad: torch.Tensor, X: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    m: torch.Tensor, inverse_rms: torch.Tensor, weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `triton_head.mhc_head_bwd`."""
    T, n, C = X.shape
    splits, groups = _groups(X, config.HEAD_BWD_PROGRAMS)
    dX, partial = X.new_empty(T, n, C), fn.new_empty(groups, n * n * C + PAD.value)
    _head_bwd_kernel[(groups * splits,)](
        grad, X, fn, scale, base, m, inverse_rms, weights, dX, partial,
        room(groups, splits, config.HEAD_TOKENS, X.device), T, C, X.stride(0), X.stride(1), n=n, SPLITS=splits,
        BLOCK_T=config.HEAD_TOKENS, BLOCK_C=config.HEAD_CHANNELS, STAGES=config.HEAD_BWD_STAGES,
        WARPS=config.HEAD_WARPS, num_warps=config.HEAD_WARPS, launch_cooperative_grid=True,
    )  # fmt: skip
    total = sum_rows(partial)
    dfn, sums = total[: n * n * C].view(n, n * C), total[n * n * C :][: n + 1]
    return dX, dfn, sums.clone()  # results of an operation must not share memory
