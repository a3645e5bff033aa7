# SPDX-License-Identifier: Apache-2.0
"""What the calculator says about a case, to stand beside what was measured."""

from collections.abc import Sequence
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


def attention_ms(case: Case, config: dict[str, Any], kernels: Sequence[dict[str, Any]]) -> list[float]:
    """Core, indexer and selection of a step on each context-parallel rank, from the times of the kernels.

    A query row of a core costs a constant and so much per key: the line through a window of 128 keys and that window
    with 512 picks. Scores and selection cost so much per entry that a row may pick.

    Args:
        case: neither tensor nor pipeline parallel, with 64 heads as the kernels were measured.
        config: of the model.
        kernels: records of vime-kernels' benchmark.
    """
    hf, size = sizes.read_config(config), case.options.get("cp", 1)
    again = 2 if "recompute_granularity" in case.options else 1
    ours = {(r["op"], r["shape"], r["direction"]): r["ours_ms"] for r in kernels}
    rows, tokens, window, picks = 4096, 131072, 128, 512  # of the measured shapes
    lines = []
    for direction in ("fwd", "bwd"):
        short, long = (
            ours["sparse_attention_v4", f"V4-Flash {shape}", direction] / rows
            for shape in ("window", "picks")
        )
        per_key = (long - short) / picks
        lines.append((short - window * per_key, per_key))
    # Causal, in groups of four: a row of 128k tokens may pick an eighth of their number on average.
    per_entry = ours["indexer_topk", "V4-Flash 128k tokens", "fwd"] / tokens / (tokens / 8)
    order: Any = "balanced" if case.options.get("cp_balance") else "contiguous"
    found = []
    for rank in range(size):
        _, position = PackLayout(PACKS[case.pack], cp_size=size, cp_rank=rank, query_order=order).owners()
        total = 0.0
        for ratio in hf.compress_ratios[: hf.num_layers]:
            entries = (position + 1) // ratio if ratio else np.zeros_like(position)
            chosen = np.minimum(entries, hf.index_topk) if ratio == 4 else entries
            keys = float((np.minimum(position + 1, hf.window) + chosen).sum())
            forward, backward = (constant * len(position) + per_key * keys for constant, per_key in lines)
            total += again * forward + backward
            if ratio == 4:
                total += again * per_entry * float(entries.sum())
        found.append(case.microbatches * total)
    return found
