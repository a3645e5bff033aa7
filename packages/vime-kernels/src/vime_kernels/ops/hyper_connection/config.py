# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton hyper-connections, and what they support."""

import torch

STREAMS = (1, 2, 4, 8)
# Projection and its backward pass: (tokens, channels, warps, stages) for bfloat16 and for float32 streams.
PROJECT = (128, 64, 8, 4)
PROJECT_EXACT = (64, 32, 8, 2)
PROJECT_BWD = (64, 128, 4, 3)
PROJECT_BWD_ADD = (64, 64, 4, 3)  # with another gradient added on the way, which takes registers
PROJECT_BWD_EXACT = (32, 64, 8, 2)
# Channels of one partial sum. It must not depend on the number of tokens, or a token's mixes would depend on the batch.
SPLIT_K = 4096
# Tokens whose gradient of fn is one partial sum: at most so many, and fewer where that leaves fewer programs.
TOKENS_PER_PARTIAL, PROGRAMS = 4096, 512
# Tokens of a program that makes the weights of the head, or their gradient.
GATE_TOKENS = 128
# Channels per thread in the kernels that move whole streams: two 16-byte loads of bfloat16.
CHANNELS_PER_THREAD = 16


def num_warps(block_c: int) -> int:
    """Warps of a program that holds block_c channels."""
    return min(16, max(1, block_c // (32 * CHANNELS_PER_THREAD)))


def tokens_per_partial(tokens: int, blocks: int, block_t: int) -> int:
    """Tokens of one partial sum of the gradient of fn, a multiple of block_t, where `blocks` programs share a token."""
    share = -(-tokens * blocks // PROGRAMS)
    return max(block_t, min(TOKENS_PER_PARTIAL, 1 << (share - 1).bit_length()))


def copy_engine(X_TK: torch.Tensor, left_over: int) -> bool:
    """Whether tiles of X can be moved by the copy engine: whole tiles, rows on 16-byte boundaries."""
    return not left_over and X_TK.data_ptr() % 16 == 0 and X_TK.stride(0) * X_TK.element_size() % 16 == 0


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
    return None
