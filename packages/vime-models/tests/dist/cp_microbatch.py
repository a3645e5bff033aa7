# SPDX-License-Identifier: Apache-2.0
"""A microbatch of a tiny DeepSeek-V4 that may be split over context-parallel ranks: model, rows, tokens, logits, loss.

The scripts that import this are given the directory of the checkpoint.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import DEVICE
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from step import shared_checkpoint

from vime_convert.megatron.exporter import export_tensors
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_models.dsv4.plugin import PLUGIN
from vime_models.host.microbatch import VimePackedSeqParams
from vime_replay.layout import PackLayout

HERE = Path(sys.argv[1])
# Every kind of layer, and a window as wide as the released one: a halo that is one row short shows.
CONFIG = next(case.config for case in PLUGIN.tiny_cases if case.name == "large-eps") | {
    "compress_ratios": [0, 4, 128, 4],
    "num_hidden_layers": 4,
    "sliding_window": 128,
}
TABLE = PLUGIN.rules(CONFIG)

MICROBATCHES: dict[str, dict[str, Any]] = {
    # The cut at row 256 is inside a sequence and, for both ratios, inside a group.
    "contiguous": {"lengths": (37, 259, 130, 86)},
    "zigzag": {"lengths": (37, 259, 130, 83), "mode": "zigzag", "pad_multiple": 3},
    "bshd": {"lengths": (301, 512), "fmt": "bshd", "max_seqlen": 512},
    "bshd-zigzag": {"lengths": (512, 400), "fmt": "bshd", "max_seqlen": 512, "mode": "zigzag"},
    # Long enough on two ranks for row balance to cut it into two parts.
    "parts": {"lengths": (90, 571, 1130, 257)},
    "long": {"lengths": (90, 571, 130, 225)},
}
# Draws that keep every selection away from ties; by rows of the stream.
SEEDS = {2048: 18}


def build(precision: str, **options: Any) -> Any:
    chosen = PRECISIONS[precision]
    with running_in(chosen):
        (model,) = PLUGIN.build(CONFIG, dtype=chosen.dtype, device=DEVICE, **options)
    load_checkpoint([model], shared_checkpoint(CONFIG, HERE / "checkpoint"), TABLE)
    return model.train()


def split_over(layout: PackLayout, tp: int = 1) -> PackLayout:
    """The layout as this rank of context parallelism sees it."""
    size, rank = dist.get_world_size() // tp, dist.get_rank() // tp
    return replace(layout, cp_size=size, cp_rank=rank)


def packing(layout: PackLayout, attached: PackLayout | None = None) -> PackedSeqParams | None:
    if layout.fmt == "bshd":
        return None
    cu_seqlens = torch.from_numpy(layout.cu_seqlens).to(DEVICE)
    return VimePackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, layout=attached
    )


def real_rows(layout: PackLayout) -> list[torch.Tensor]:
    """Rows of the stream that hold the tokens of each sample."""
    starts = layout.cu_seqlens.tolist()
    return [torch.arange(start, start + n) for start, n in zip(starts, layout.lengths, strict=False)]


def tokens(layout: PackLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the whole stream, padding included, and labels: -100 where there is nothing to predict."""
    generator = torch.Generator().manual_seed(SEEDS.get(layout.total, 0))
    # Tokens first: they do not depend on how the samples are padded.
    real = torch.randint(CONFIG["vocab_size"], (sum(layout.lengths),), generator=generator)
    ids = torch.randint(CONFIG["vocab_size"], (layout.total,), generator=generator)
    ids[torch.cat(real_rows(layout))] = real
    labels = torch.full_like(ids, -100)
    for rows in real_rows(layout):
        labels[rows[:-1]] = ids[rows[1:]]
    return ids.to(DEVICE), labels.to(DEVICE)


def logits_of(
    model: Any, layout: PackLayout, rows: torch.Tensor, ids: torch.Tensor, attached: PackLayout | None = None
) -> torch.Tensor:
    """[rows, vocabulary] of the given rows of the stream; `attached` goes along with the microbatch."""
    batch = len(layout.lengths) if layout.fmt == "bshd" else 1
    logits = model(ids[rows].view(batch, -1), None, None, packed_seq_params=packing(layout, attached))
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        logits = gather_from_tensor_model_parallel_region(logits)
    return logits.flatten(0, 1)[:, : CONFIG["vocab_size"]]


def loss_of(logits: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """This part of the mean over all tokens of the microbatch."""
    total = torch.nn.functional.cross_entropy(logits, labels[rows], ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum()


def split_step(
    model: Any, layout: PackLayout, labels: torch.Tensor, forward: Callable[[Any], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of this rank's rows, which `forward` computes with the model in DDP, and the gradients of all ranks."""
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer()
    logits = forward(wrapped)
    # Gradients are averaged over context-parallel ranks; Megatron's schedule multiplies losses as this does.
    loss = loss_of(logits, labels, torch.from_numpy(layout.rows("local"))) * layout.cp_size
    loss.backward()
    finalize_model_grads([wrapped])
    return logits, dict(export_tensors([wrapped], TABLE, value=lambda p: getattr(p, "main_grad", None)))


def whole(layout: PackLayout, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Logits of the tokens of all ranks."""
    stream = logits.new_zeros(layout.total, logits.shape[1])
    stream[rows] = logits.detach()
    dist.all_reduce(stream, group=parallel_state.get_context_parallel_group())
    return stream[torch.cat(real_rows(layout))]
