# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton hyper-connections, and what they support."""

import torch

from vime_kernels._backend import has_gluon

STREAMS = (1, 2, 4, 8)
# Projection and its backward pass: (tokens, channels, warps, stages) for bfloat16 and for float32 streams.
PROJECT = (128, 64, 8, 4)
PROJECT_STAGES = 4  # of `gluon_project`: tiles of 128 tokens and 128 channels
PROJECT_EXACT = (64, 32, 8, 2)
PROJECT_BWD = (64, 128, 4, 3)
PROJECT_BWD_ADD = (64, 64, 4, 3)  # with another gradient added on the way, which takes registers
PROJECT_BWD_EXACT = (32, 64, 8, 2)
# Channels of one partial sum. It must not depend on the number of tokens, or a token's mixes would depend on the batch.
SPLIT_K = 4096
# Tokens whose gradient of fn is one partial sum, at most; and programs of that kernel that run at the same time, two on
# each multiprocessor of an H100 or H200.
TOKENS_PER_PARTIAL, PROGRAMS = 4096, 264
# Tokens of a program that makes the weights of the head, or their gradient.
GATE_TOKENS = 128
# The head in one pass: channels of a program. Forward, warps of each role, tiles in shared memory, programs of a
# multiprocessor, registers of a thread on average, and in the role that collapses; a warp has 16 · HEAD_CHANNELS values
# of the terms of fn in registers. Backward, also tokens of a tile; a thread holds rows of fn and their gradient.
HEAD_CHANNELS = 512
HEAD_WARPS, HEAD_STAGES, HEAD_PROGRAMS, HEAD_REGISTERS, HEAD_COLLAPSE_REGISTERS = 8, 6, 1, 128, 80
HEAD_BWD_TOKENS, HEAD_BWD_WARPS, HEAD_BWD_STAGES, HEAD_BWD_PROGRAMS = 4, 4, 5, 2
# Channels per thread in the kernels that move whole streams, forward and backward: 16-byte loads of bfloat16.
CHANNELS_PER_THREAD, CHANNELS_PER_THREAD_BWD = 16, 32
# Channels of a forward program of those kernels: one warp.
STREAM_CHANNELS = 512


def num_warps(block_c: int, per_thread: int = CHANNELS_PER_THREAD) -> int:
    """Warps of a program that holds block_c channels."""
    return min(16, max(1, block_c // (32 * per_thread)))


def tokens_per_partial(tokens: int, blocks: int, block_t: int) -> int:
    """Tokens of one partial sum of the gradient of fn, a multiple of block_t, where `blocks` programs share a token.

    Of the numbers of partial sums that are allowed, the first that leaves least of the last wave of programs empty.
    """
    fewest = -(-tokens // TOKENS_PER_PARTIAL)
    counts = range(fewest, fewest + max(8, PROGRAMS // blocks))
    count = min(counts, key=lambda count: -(-blocks * count // PROGRAMS) / count)
    return -(-tokens // (count * block_t)) * block_t


def copy_engine(X_TK: torch.Tensor, left_over: int) -> bool:
    """Whether tiles of X can be moved by the copy engine: whole tiles, rows of their own on 16-byte boundaries."""
    row_bytes = X_TK.stride(0) * X_TK.element_size()
    return not left_over and X_TK.data_ptr() % 16 == 0 and row_bytes > 0 and row_bytes % 16 == 0


def hopper(X_TK: torch.Tensor, W: int) -> bool:
    """Whether the projection for Hopper can run: whole tiles, and at most 32 rows of fn. Not a matter of T."""
    if not X_TK.is_cuda or X_TK.dtype != torch.bfloat16 or W > 32 or SPLIT_K % 128:
        return False
    device = torch.cuda.get_device_capability(X_TK.device)
    return copy_engine(X_TK, X_TK.shape[1] % 128) and device == (9, 0) and has_gluon()


def one_pass(X_TnC: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the head can be made in one pass: four streams side by side, on Hopper, in vectors of 16 bytes."""
    T, n, C = X_TnC.shape
    if not X_TnC.is_cuda or X_TnC.dtype != torch.bfloat16 or n != 4 or C % 16 or not T:
        return False
    rows = all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in (X_TnC, *others))
    device = torch.cuda.get_device_capability(X_TnC.device)
    return rows and X_TnC.stride(0) > 0 and X_TnC.stride(1) == C and device == (9, 0) and has_gluon()


def head_groups(X_TnC: torch.Tensor, per_multiprocessor: int, tokens: int) -> tuple[int, int]:
    """Programs that share a token in the head, and how many such groups run at the same time; `tokens` of a tile."""
    T, _, C = X_TnC.shape
    splits = -(-C // HEAD_CHANNELS)
    programs = per_multiprocessor * torch.cuda.get_device_properties(X_TnC.device).multi_processor_count
    return splits, min(programs // splits, -(-T // tokens))


def unsupported_sinkhorn(logits_Tnn: torch.Tensor) -> str | None:
    """What the kernel cannot do about these matrices, None when it can."""
    if logits_Tnn.dtype == torch.float64:
        return "float64"
    n = logits_Tnn.shape[1]
    return None if n in STREAMS else f"n={n} streams (1, 2, 4 or 8)"


def unsupported(X_TnC: torch.Tensor, *others: torch.Tensor) -> str | None:
    """What the kernels cannot do about these streams and the tensors that go with them, None when they can."""
    if any(t.dtype == torch.float64 for t in others):
        return "float64"
    if X_TnC.dtype not in (torch.bfloat16, torch.float32):
        return f"streams in {X_TnC.dtype} (bfloat16 or float32)"
    n, C = X_TnC.shape[1:]
    if n not in STREAMS:
        return f"n={n} streams (1, 2, 4 or 8)"
    if C > 8192:
        return f"C={C} (at most 8192)"
    if n * X_TnC.stride(1) >= 2**31:
        return "streams that lie 2**31 elements apart or more"
    return None
