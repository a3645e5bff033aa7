# SPDX-License-Identifier: Apache-2.0
"""Row balance in context parallelism: rows arrive where the layout says and come back, and no bit changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from cp_microbatch import MICROBATCHES, build, logits_of, packing, split_over, tokens
from harness import DEVICE
from megatron.core import parallel_state

from vime_models.dsv4 import attention, row_balance
from vime_models.dsv4.context_parallel import ContextParallel
from vime_models.dsv4.thd import TokenLayout, token_layout
from vime_models.host import bringup
from vime_replay.layout import PackLayout

CORE, LAYOUT = attention.sparse_attention_v4, ContextParallel.layout


def balance_moves_rows() -> dict[str, bool]:
    """Row numbers as contents: where they arrive, and that they come back."""
    size, rank = dist.get_world_size(), dist.get_rank()
    bringup.init_world(cp=size)
    group = parallel_state.get_context_parallel_group()
    found = {}
    for name, layout in {
        "thd": PackLayout((size * 150,), cp_size=size, cp_rank=rank),
        "bshd": PackLayout((size * 128,) * 2, "bshd", cp_size=size, cp_rank=rank),
        "thd-parts": PackLayout((size * 4096,), cp_size=size, cp_rank=rank),
        "bshd-parts": PackLayout((size * 1024,) * 2, "bshd", cp_size=size, cp_rank=rank),
    }.items():
        batch = len(layout.lengths)
        hidden = torch.zeros(layout.local_rows // batch, batch, 1, device=DEVICE)
        given = token_layout(hidden, packing(layout), cp_size=size, cp_rank=rank, halo=128)
        moved = row_balance.balance(given.rows, given, group)
        keys = given._slice_rows(given.halo)
        target = row_balance.balanced(given, size, rank)
        found[name] = (
            torch.equal(given.rows.cpu(), torch.from_numpy(layout.rows("contiguous")).int())
            and torch.equal(moved.cpu(), torch.from_numpy(layout.rows("balanced")).int())
            and torch.equal(moved, target.rows)
            and torch.equal(row_balance.restore(moved, given, group), given.rows)
            and torch.equal(row_balance.balance_keys(keys, given, group), target._slice_rows(target.halo))
        )
    return found


def balance_keeps_bits(name: str) -> list[bool]:
    """Whether outputs and log-sum-exps of every attention, and all logits, are the same bits with row balance."""
    layout = split_over(PackLayout(**MICROBATCHES[name]))
    rows = torch.from_numpy(layout.rows("local"))
    # On GPUs Megatron's experts add up in whatever order, unless told otherwise.
    torch.use_deterministic_algorithms(DEVICE == "cuda", warn_only=True)
    runs = []
    for balanced in (False, True):
        model = build("float32", cp=layout.cp_size, cp_layout=layout.mode, cp_balance=balanced)
        with torch.no_grad(), cores(model) as seen:
            logits = logits_of(model, layout, rows, tokens(layout)[0])
        runs.append([*seen, logits])
    torch.use_deterministic_algorithms(False)
    return [torch.equal(a, b) for a, b in zip(*runs, strict=True)]


@contextmanager
def cores(model: Any) -> Iterator[list[torch.Tensor]]:
    """Outputs and log-sum-exps of every attention core, in contiguous order."""
    seen: list[torch.Tensor] = []
    cp = model.decoder.layers[0].self_attention.cp
    layouts: list[TokenLayout] = []

    def core(*args: Any, **keywords: Any) -> Any:
        results = CORE(*args, **keywords)
        seen.extend(cp.restore(result, layouts[-1]) for result in results)
        return results

    def layout(self: ContextParallel, *args: Any) -> TokenLayout:
        layouts.append(LAYOUT(self, *args))
        return layouts[-1]

    attention.sparse_attention_v4, ContextParallel.layout = core, layout  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        attention.sparse_attention_v4, ContextParallel.layout = CORE, LAYOUT  # type: ignore[method-assign]
