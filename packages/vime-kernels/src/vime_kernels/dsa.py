# SPDX-License-Identifier: Apache-2.0
"""Operations of DeepSeek sparse attention: pooling, indexer, selection and attention over the selection."""

from vime_kernels.ops.gated_pool.interface import gated_pool
from vime_kernels.ops.gated_pool.select import kpool_select
from vime_kernels.ops.indexer.interface import indexer_logits, indexer_scores, indexer_topk, lightning_indexer
from vime_kernels.ops.indexer.ranges import causal_ranges
from vime_kernels.ops.indexer_loss.interface import indexer_kl_loss, indexer_kl_target
from vime_kernels.ops.rotary.interface import rotate
from vime_kernels.ops.sparse_attention.interface import sparse_attention, sparse_attention_v4
from vime_kernels.ops.topk.interface import TopKFn, get_topk_fn, topk

__all__ = [
    "TopKFn",
    "causal_ranges",
    "gated_pool",
    "get_topk_fn",
    "indexer_kl_loss",
    "indexer_kl_target",
    "indexer_logits",
    "indexer_scores",
    "indexer_topk",
    "kpool_select",
    "lightning_indexer",
    "rotate",
    "sparse_attention",
    "sparse_attention_v4",
    "topk",
]
