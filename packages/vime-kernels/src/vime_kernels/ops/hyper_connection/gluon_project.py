# SPDX-License-Identifier: Apache-2.0
"""The projection of the rms-normalised streams for Hopper: the sums over channels before the norm, forward.

A warp brings tiles of X and of the terms of fn with the bulk copy engine, two warpgroups multiply. X is the left
operand from registers, where its squares are summed on the way, so that shared memory is read once for both. Programs
are persistent, and the copies of the next block of tokens begin under the end of this one. Terms, pieces and the norm
are those of `triton_project`; takes what `config.hopper` admits.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vime_kernels.ops.hyper_connection import config

BLOCK_T = gl.constexpr(128)  # tokens, 64 for each warpgroup
BLOCK_K = gl.constexpr(128)
BLOCK_W = gl.constexpr(32)  # rows of one term of fn
# Two terms side by side, and one.
PAIR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ONE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PAIR, 2))
LEFT_OF_ONE = gl.constexpr(gl.DotOperandLayout(0, ONE, 2))


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    partial, squares, T, K, x_s, large_s, small_s, full, empty,
    ME: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Warpgroup ME: its tokens' sums, [pieces, T, BLOCK_W] and [pieces, T]."""
    blocks = gl.cdiv(T, BLOCK_T)
    step = 0
    for tile in range(gl.program_id(0), blocks * gl.cdiv(K, SPLIT_K), gl.num_programs(0)):
        piece = tile // blocks
        pair = gl.zeros([64, 2 * BLOCK_W], gl.float32, PAIR)
        one = gl.zeros([64, BLOCK_W], gl.float32, ONE)
        square = gl.zeros([64], gl.float32, gl.SliceLayout(1, LEFT))
        for _ in range(gl.cdiv(gl.minimum(K - piece * SPLIT_K, SPLIT_K), BLOCK_K)):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            x = x_s.index(slot).slice(ME * 64, 64).load(LEFT)
            # Fresh sums for every tile: the tensor core truncates when it adds to a large one.
            p = gl.zeros([64, 2 * BLOCK_W], gl.float32, PAIR)
            o = gl.zeros([64, BLOCK_W], gl.float32, ONE)
            p = warpgroup_mma(x, large_s.index(slot).permute((1, 0)), p, use_acc=False, is_async=True)
            right = small_s.index(slot).permute((1, 0))
            o = warpgroup_mma(gl.convert_layout(x, LEFT_OF_ONE), right, o, use_acc=False, is_async=True)
            wide = x.to(gl.float32)
            square += gl.sum(wide * wide, 1)
            p, o = warpgroup_mma_wait(0, deps=[p, o])
            mbarrier.arrive(empty.index(slot))
            pair += p
            one += o
            step += 1
        total = gl.sum(gl.permute(gl.reshape(pair, [64, 2, BLOCK_W]), (0, 2, 1)), 2)
        total = gl.convert_layout(total, ONE) + one
        t = tile % blocks * BLOCK_T + ME * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ONE))
        w = gl.arange(0, BLOCK_W, layout=gl.SliceLayout(0, ONE))
        row = piece.to(gl.int64) * T + t
        gl.store(partial + row[:, None] * BLOCK_W + w[None, :], total, mask=(t < T)[:, None])
        gl.store(squares + row, gl.convert_layout(square, gl.SliceLayout(1, ONE)), mask=t < T)


@gluon.jit
def _bring(  # type: ignore[no-untyped-def]
    x_desc, large_desc, small_desc, T, K, x_s, large_s, small_s, full, empty,
    STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """The producer's one warp."""
    blocks = gl.cdiv(T, BLOCK_T)
    bytes_: gl.constexpr = (
        x_desc.block_type.nbytes + large_desc.block_type.nbytes + small_desc.block_type.nbytes
    )
    step = 0
    for tile in range(gl.program_id(0), blocks * gl.cdiv(K, SPLIT_K), gl.num_programs(0)):
        token = tile % blocks * BLOCK_T
        begin = tile // blocks * SPLIT_K
        for k in range(begin, gl.minimum(begin + SPLIT_K, K), BLOCK_K):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), bytes_)
            tma.async_copy_global_to_shared(x_desc, [token, k], full.index(slot), x_s.index(slot))
            tma.async_copy_global_to_shared(large_desc, [0, k], full.index(slot), large_s.index(slot))
            tma.async_copy_global_to_shared(
                small_desc, [2 * BLOCK_W, k], full.index(slot), small_s.index(slot)
            )
            step += 1


@gluon.jit(do_not_specialize=["T"])
def _project_kernel(  # type: ignore[no-untyped-def]
    x_desc, large_desc, small_desc, partial, squares, T, K, STAGES: gl.constexpr, SPLIT_K: gl.constexpr
):
    """Buffers and barriers of one program, then its roles."""
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, BLOCK_K], x_desc.layout)
    large_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * BLOCK_W, BLOCK_K], large_desc.layout)
    small_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_W, BLOCK_K], small_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_multiply, (partial, squares, T, K, x_s, large_s, small_s, full, empty, 0, STAGES, SPLIT_K)),
            (_multiply, (partial, squares, T, K, x_s, large_s, small_s, full, empty, 1, STAGES, SPLIT_K)),
            (_bring, (
                x_desc, large_desc, small_desc, T, K, x_s, large_s, small_s, full, empty, STAGES, SPLIT_K,
            )),
        ],
        [4, 1], [216, 40],
    )  # fmt: skip


def sums(X: torch.Tensor, terms: torch.Tensor, partial: torch.Tensor, squares: torch.Tensor) -> None:
    """Writes the pieces of fn · X, [pieces, T, BLOCK_W], and of X · X, [pieces, T]; terms as in `triton_project`."""
    T, K = X.shape
    programs = torch.cuda.get_device_properties(X.device).multi_processor_count
    layout = gl.NVMMASharedLayout(128, 16, 2)
    large, small = (TensorDescriptor.from_tensor(terms, [rows, BLOCK_K.value], layout) for rows in (64, 32))
    _project_kernel[(min(programs, triton.cdiv(T, BLOCK_T.value) * len(partial)),)](
        TensorDescriptor.from_tensor(X, [BLOCK_T.value, BLOCK_K.value], layout), large, small, partial, squares,
        T, K, STAGES=config.PROJECT_STAGES, SPLIT_K=config.SPLIT_K, num_warps=4,
    )  # fmt: skip
