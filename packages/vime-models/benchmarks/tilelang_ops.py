# SPDX-License-Identifier: Apache-2.0
"""The slice with the TileLang kernels of Miles in place of ours: `train_slice.py 16k --peer tilelang_ops`.

Attention core, forward and backward (256 threads, the faster choice), and indexer logits; the rest stays. Put
TileLang 0.1.9 and miles_plugins (radixark/miles at 31f1ca96) on PYTHONPATH. Their attention takes one buffer of keys
and one list of rows, so window and entries are joined first, and that counts, as it does in their model.
"""

import importlib
import os
from typing import Any

import torch

from vime_kernels.dsa import topk
from vime_models.dsv4 import attention, indexer

KERNELS = "miles_plugins.models.deepseek_v4.ops.kernel.tilelang"
# As a profiler sees them.
KERNEL_NAMES = (
    "main_kernel",
    "preprocess_kernel_kernel",
    "sparse_mqa_bwd_kernel_kernel",
    "postprocess_kernel_kernel",
    "tl_indexer_fwd_kernel_kernel",
    "clean_logits_kernel_kernel",
)
GUARD = 64  # rows in front of a buffer: the kernels touch row -1


def use() -> None:
    """Swaps the operations of the model."""
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    os.environ.setdefault("TILELANG_TARGET", "cuda -arch=sm_90a")
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    for part in ("sparse_mla_fwd", "sparse_mla_bwd", "indexer_fwd"):
        importlib.import_module(f"{KERNELS}_{part}")
    attention.sparse_attention_v4 = sparse_attention_v4  # type: ignore[assignment]
    indexer.indexer_topk = indexer_topk  # type: ignore[assignment]


def sparse_attention_v4(
    q: torch.Tensor,
    kv_window: torch.Tensor,
    kv_compressed: torch.Tensor | None,
    sm_scale: float,
    attn_sink: torch.Tensor,
    *,
    window: int,
    cu_seqlens: torch.Tensor,
    q_positions: torch.Tensor,
    indices: torch.Tensor | None = None,
    cmp_ranges: tuple[torch.Tensor, torch.Tensor] | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """As ours, without the log-sum-exp."""
    begins = cu_seqlens[torch.searchsorted(cu_seqlens[1:], q_positions, right=True)]
    rows = q_positions[:, None] - torch.arange(window - 1, -1, -1, dtype=torch.int32, device=q.device)
    lists = [torch.where(rows >= begins[:, None], rows, -1)]
    if kv_compressed is not None and cmp_ranges is not None:
        columns = torch.arange(len(kv_compressed), dtype=torch.int32, device=q.device)
        visible = (columns >= cmp_ranges[0][:, None]) & (columns < cmp_ranges[1][:, None])
        indices = torch.where(visible, columns, -1)
    if kv_compressed is not None and indices is not None:
        lists.append(torch.where(indices >= 0, indices + len(kv_window), -1))
        kv_window = torch.cat([kv_window, kv_compressed])
    joined = torch.cat(lists, 1)
    joined = torch.nn.functional.pad(joined, (0, -joined.shape[1] % 64), value=-1).contiguous()
    return _Attention.apply(q, kv_window, attn_sink, joined), None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        H, K = q.shape[1], rows.shape[1]
        kv = torch.nn.functional.pad(kv, (0, 0, GUARD, 0))[GUARD:]
        kernel = importlib.import_module(f"{KERNELS}_sparse_mla_fwd").sparse_mqa_fwd(H, 512, K, None)
        out, lse = kernel(q[None], kv[None], sink, rows[None])
        ctx.save_for_backward(q, kv, sink, rows, out, lse)
        return out[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, kv, sink, rows, out, lse = ctx.saved_tensors
        (S, H, _), N, K = q.shape, len(kv), rows.shape[1]
        module = importlib.import_module(f"{KERNELS}_sparse_mla_bwd")
        grad = grad.contiguous()[None]
        sums = torch.zeros(N + GUARD, 512, device=q.device)[GUARD:][None]
        dsink = torch.zeros_like(sink)
        delta = module.preprocess(1, S, H, 512)(out, grad)
        main = module.bwd(1, S, N, H, 512, K, None, threads=256, num_stages=1)
        dq = main(q[None], kv[None], grad, sink, rows[None], lse, delta, sums, dsink)
        return dq[0], module.postprocess(1, N, 512)(sums)[0], dsink, None


def indexer_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    width: int,
    **ignored: Any,
) -> torch.Tensor:
    """As ours, their logits and our selection, in chunks of rows."""
    logits = importlib.import_module(f"{KERNELS}_indexer_fwd").indexer_fwd_interface
    picks = []
    for part in torch.arange(len(q), device="cpu").split(max(1, 2**28 // len(k))):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        scores = logits(q[rows], k, weights[rows], starts[rows], ends[rows], clean_logits=True)
        picks.append(topk(scores, width, starts[rows], ends[rows]))
    return torch.cat(picks)
