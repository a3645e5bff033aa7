# SPDX-License-Identifier: Apache-2.0
"""What can go wrong at a border, of a sequence or of a rank: replacements of one method each."""

from typing import Any

import torch
import torch.distributed as dist

from vime_kernels.dsa import causal_ranges
from vime_models.dsv4.context_parallel import ContextParallel
from vime_models.dsv4.thd import TokenLayout

ORIGINAL: dict[str, Any] = {
    "with_halo": ContextParallel.with_halo,
    "pools": TokenLayout.pools,
    "entries_before": TokenLayout.entries_before,
}


def oldest_key_lost(self: ContextParallel, x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    keep = x.new_ones(layout.halo + layout.length, 1)
    keep[1] = 0
    return ORIGINAL["with_halo"](self, x, layout) * keep


def rows_of(layout: TokenLayout) -> torch.Tensor:
    """0, 1, … as if the rank's rows were all there is."""
    return torch.arange(layout.length, dtype=torch.int32, device=layout.starts.device)


def pools_from_the_cut(self: TokenLayout, ratio: int, *, overlap: bool) -> Any:
    reach, cu_seqlens, first = ORIGINAL["pools"](self, ratio, overlap=overlap)
    # Entry 1 is where the cut sequence begins.
    return reach, torch.where(cu_seqlens == cu_seqlens[1], reach, cu_seqlens), first * 0 + reach // ratio


def without_previous_group(self: TokenLayout, ratio: int, *, overlap: bool) -> Any:
    reach, cu_seqlens, first = ORIGINAL["pools"](self, ratio, overlap=overlap)
    if overlap and self.starts[0]:
        # One group later: its pool is then one that is skipped.
        cu_seqlens = torch.where(cu_seqlens == cu_seqlens[1], cu_seqlens + ratio, cu_seqlens)
    return reach, cu_seqlens, first


def all_rows(entries: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(entries) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, entries.contiguous())
    return parts


# Owner, attribute, replacement; every one must move the logits.
MISTAKES: dict[str, tuple[type, str, Any]] = {
    "no rows from the neighbour": (
        ContextParallel,
        "with_halo",
        lambda self, x, layout: torch.cat([x.new_zeros(layout.halo, x.shape[1]), x]),
    ),
    "oldest key of the window lost": (ContextParallel, "with_halo", oldest_key_lost),
    "windows cross sequences": (
        TokenLayout,
        "window",
        property(
            lambda self: {
                "cu_seqlens": self.starts.new_tensor([0, self.halo + self.length]),
                "q_positions": rows_of(self) + self.halo,
            }
        ),
    ),
    "groups restart at the cut": (TokenLayout, "pools", pools_from_the_cut),
    "group before the cut missing": (TokenLayout, "pools", without_previous_group),
    "entries counted over the sum of lengths": (
        TokenLayout,
        "_cu_entries",
        lambda self, ratio: self.cu_seqlens // ratio,
    ),
    "entry owned by its first token": (
        TokenLayout,
        "entries_before",
        lambda self, rows, ratio: ORIGINAL["entries_before"](self, rows + (ratio - 1) * (rows > 0), ratio),
    ),
    "positions restart at the cut": (
        TokenLayout,
        "positions",
        property(lambda self: rows_of(self).long()),
    ),
    "queries see by local row": (
        TokenLayout,
        "visible",
        lambda self, ratio: causal_ranges(self.cu_seqlens, ratio=ratio, q_positions=rows_of(self)),
    ),
    "entries left as gathered": (
        ContextParallel,
        "gather_entries",
        lambda self, entries, layout, ratio: torch.cat(all_rows(entries))[: 512 // ratio],
    ),
}
