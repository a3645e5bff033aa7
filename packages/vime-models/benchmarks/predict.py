# SPDX-License-Identifier: Apache-2.0
"""What the calculator says about a case, to stand beside what was measured."""

from typing import Any

import numpy as np
from slices import PACKS, Case

from vime_models import plan
from vime_models.dsv4 import sizes
from vime_replay.layout import PackLayout


def memory_gib(case: Case, config: dict[str, Any]) -> float:
    """Of the fullest rank, as `vime-models plan` counts it."""
    layout = _layout(case)
    hf = sizes.read_config(config)
    return max(stage.total for stage in plan.stages(hf, sizes, layout)) / 2**30


def step_ms(case: Case, config: dict[str, Any]) -> float:
    """The rough time by which the calculator ranks layouts: products at a flat rate, wires that nothing hides."""
    layout, hf = _layout(case), sizes.read_config(config)
    return 1e3 * plan.seconds(hf, sizes, layout, plan.stages(hf, sizes, layout))


def sent_gb(case: Case, config: dict[str, Any]) -> dict[str, float]:
    """What the busiest rank sends in a step, over each group."""
    stages = plan.stages(sizes.read_config(config), sizes, _layout(case))
    return {group: max(stage.sent[group] for stage in stages) / 1e9 for group in stages[0].sent}


def _layout(case: Case) -> plan.Layout:
    options = case.options
    tp, cp, pp = (options.get(name, 1) for name in ("tp", "cp", "pp"))
    replicas = case.world // (tp * cp * pp)
    return plan.Layout(
        gpus=case.world,
        tp=tp,
        cp=cp,
        pp=pp,
        ep=options.get("ep", 1),
        seq_len=sum(PACKS[case.pack]),
        batch=case.microbatches * replicas,
        recompute="full" if "recompute_granularity" in options else "none",
    )


def attention_shares(case: Case, config: dict[str, Any]) -> list[float]:
    """Which part of the attention's operations each context-parallel rank does, forward and backward; they sum to 1."""
    hf, size = sizes.read_config(config), case.options.get("cp", 1)
    # The indexer has no backward pass; five products in place of two in that of the core.
    again = 2 if "recompute_granularity" in case.options else 1
    core, scores = again + 2.5, again
    order: Any = "balanced" if case.options.get("cp_balance") else "contiguous"
    work = []
    for rank in range(size):
        _, position = PackLayout(PACKS[case.pack], cp_size=size, cp_rank=rank, query_order=order).owners()
        total = 0.0
        for ratio in hf.compress_ratios[: hf.num_layers]:
            entries = (position + 1) // ratio if ratio else np.zeros_like(position)
            chosen = np.minimum(entries, hf.index_topk) if ratio == 4 else entries
            keys = np.minimum(position + 1, hf.window) + chosen
            total += core * 4 * hf.num_heads * hf.head_dim * float(keys.sum())
            if ratio == 4:
                total += scores * 2 * hf.index_n_heads * hf.index_head_dim * float(entries.sum())
        work.append(total)
    return [part / sum(work) for part in work]
