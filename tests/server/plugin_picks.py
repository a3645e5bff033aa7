# SPDX-License-Identifier: Apache-2.0
"""What the dsv4 plugin picks, scores and predicts on a token sequence, in the server tests' terms."""

from dataclasses import dataclass
from pathlib import Path

import torch

from vime_convert.plugin import load_plugin
from vime_convert.reader import CheckpointReader
from vime_models.dsv4.indexer import Indexer

UNSEEN = float("-inf")


@dataclass(frozen=True)
class Forward:
    """One forward pass over T tokens.

    Attributes:
        picks: int32 [T, L, K], -1 for nothing.
        scores: float32 [T, L, N], -inf where a row does not see an entry.
        logprobs: float32 [T, V].
    """

    picks: torch.Tensor
    scores: torch.Tensor
    logprobs: torch.Tensor


@torch.no_grad()
def run(checkpoint: Path, token_ids: list[int], *, dtype: torch.dtype, qat: str) -> Forward:
    """The plugin's pass in `dtype`, with the roundings of `qat` ("off", or "rollout" for vLLM's caches)."""
    from vime_convert.megatron.loader import load_checkpoint

    plugin = load_plugin("deepseek_v4")
    plugin.setup("cpu")
    reader = CheckpointReader(checkpoint)
    config = reader.config()
    chunks = plugin.build(config, dtype=dtype, device="cpu", qat=qat)
    load_checkpoint(chunks, reader, plugin.rules(config))
    picks, scores = [], []
    for module in chunks[0].modules():
        if isinstance(module, Indexer):
            _record(module, picks, scores)
    logits = plugin.forward(chunks, torch.tensor([token_ids]))[0].float()
    return Forward(torch.stack(picks, 1), torch.stack(scores, 1), logits.log_softmax(-1))


def _record(indexer: Indexer, picks: list[torch.Tensor], scores: list[torch.Tensor]) -> None:
    """Layers run in order, and one chunk holds all rows of these short sequences."""
    select, width = indexer.topk_fn, indexer.topk

    def topk_fn(
        logits: torch.Tensor, topk: int, starts: torch.Tensor, ends: torch.Tensor, *, row_offset: int
    ) -> torch.Tensor:
        chosen = select(logits, topk, starts, ends, row_offset=row_offset)
        columns = torch.arange(logits.shape[1])
        seen = (columns >= starts.unsqueeze(1)) & (columns < ends.unsqueeze(1))
        scores.append(logits.float().masked_fill(~seen, UNSEEN))
        picks.append(torch.nn.functional.pad(chosen, (0, width - topk), value=-1))
        return chosen

    indexer.topk_fn = topk_fn
