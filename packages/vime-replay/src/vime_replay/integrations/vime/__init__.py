# SPDX-License-Identifier: Apache-2.0
"""vime: the places where its rollout and its trainer call this package.

| in vime | call |
| --- | --- |
| `utils/arguments.py`, parser; after all overrides | `add_arguments(parser)`; `validate_arguments(args)` |
| `rollout/vllm_rollout.py`, request | `payload["sampling_params"] |= request_parameters(args, sample)` |
| the same, after tokens were appended | `apply_choice(args, sample, choice, start=...)` |
| `--rollout-sample-hook-path` | `vime_replay.integrations.vime.spill_indexer_topk` |
| `ray/rollout.py`, list of columns of a rank | `"rollout_indexer_topk"` |
| `actor.py`, after the model is built | `manager = make_manager(args, role)`, and attach the model to it |
| the same | `self.indexer_replay = IndexerReplay(args, manager, Parallel.from_mpu())` |
| the same, beside `fill_routing_replay` | `fill_indexer_replay(self, data_iterator, num_microbatches, rollout_data)` |
| the same, `can_reuse_log_probs_in_loss` | `and (not args.use_indexer_replay or args.use_rollout_indexer_replay)` |
| the same, beside each use of `RoutingReplay` | the same name on `self.indexer_replay` |
| `model.py`, instead of `get_batch` | `self.indexer_replay.with_tickets(get_batch)` |
| `model.py`, around the forward of a train step | `with self.indexer_replay.forward_step():` |

`python -m vime_replay.integrations.vime --check` lists every name of the host that this needs. The rollout's half
needs no torch. Facts of the host were read in vime at revisions 0696c9bd8e to fec799ee1b.
"""

from typing import TYPE_CHECKING, Any

from vime_replay.continuation import append_rows
from vime_replay.integrations.vime.arguments import add_arguments, spec_of, validate_arguments
from vime_replay.integrations.vime.probe import check
from vime_replay.integrations.vime.rollout import (
    apply_choice,
    request_parameters,
    rows_of_meta_info,
    spill_indexer_topk,
)

if TYPE_CHECKING:
    from vime_replay.integrations.vime.trainer import (
        IndexerReplay,
        Parallel,
        fill_indexer_replay,
        make_manager,
        pack_rows,
    )

__all__ = [
    "IndexerReplay",
    "Parallel",
    "add_arguments",
    "append_rows",
    "apply_choice",
    "check",
    "fill_indexer_replay",
    "make_manager",
    "pack_rows",
    "request_parameters",
    "rows_of_meta_info",
    "spec_of",
    "spill_indexer_topk",
    "validate_arguments",
]

TRAINER = ("IndexerReplay", "Parallel", "fill_indexer_replay", "make_manager", "pack_rows")


def __getattr__(name: str) -> Any:
    # The trainer's half needs torch, which a rollout process may not have.
    if name in TRAINER:
        from vime_replay.integrations.vime import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
