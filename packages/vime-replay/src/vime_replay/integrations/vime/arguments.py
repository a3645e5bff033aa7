# SPDX-License-Identifier: Apache-2.0
"""Flags of the replay in vime, and which combinations are refused."""

import json
from argparse import ArgumentParser, Namespace
from functools import lru_cache
from pathlib import Path

from vime_replay.errors import ReplayConfigError
from vime_replay.spec import ReplaySpec, indexer_spec


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the replay's flags to vime's parser."""
    group = parser.add_argument_group("indexer replay")
    add = group.add_argument
    add(
        "--use-indexer-replay",
        action="store_true",
        help="record picks with log-probabilities, replay in training",
    )
    add(
        "--use-rollout-indexer-replay",
        action="store_true",
        help="replay the rollout's picks; implies the former",
    )
    add(
        "--rollout-indexer-topk-num-streams",
        type=int,
        help="layers with an indexer; compared with the checkpoint's configuration, which decides",
    )
    add("--rollout-indexer-topk-store-dir", help="directory that spill_indexer_topk writes to")
    add("--indexer-replay-missing", choices=("error", "recompute", "drop-sample"), default="error")
    add("--indexer-replay-pad-policy", choices=("recompute", "self", "empty"), default="recompute")
    add("--indexer-replay-validate", choices=("off", "range", "full"), default="range")
    add("--indexer-replay-order", choices=("sorted", "keep"), default="sorted")
    add("--indexer-replay-prefetch-microbatches", type=int, default=1, help="packed ahead, for rows on disk")
    add(
        "--indexer-replay-check-interval", type=int, default=0, help="rollouts between checks; 0 never checks"
    )
    add(
        "--indexer-replay-check-rows",
        type=int,
        default=64,
        help="rows of a layer and microbatch that are compared",
    )
    return parser


def validate_arguments(args: Namespace) -> None:
    """Refuses what cannot work, and sets what follows from other flags; call it after all overrides.

    Raises:
        ReplayConfigError: naming the flag.
    """
    if args.use_rollout_indexer_replay:
        args.use_indexer_replay = True
        # vime forwards changed engine flags to the server under this prefix.
        args.vllm_enable_return_indexer_topk = True
        spec_of(args)
    elif args.use_indexer_replay and getattr(args, "use_rollout_logprobs", False):
        raise ReplayConfigError(
            "--use-indexer-replay: expected a pass of log-probabilities that records picks, got "
            "--use-rollout-logprobs, which skips it; replay the rollout's picks with --use-rollout-indexer-replay"
        )
    limits = {"prefetch_microbatches": 0, "check_interval": 0, "check_rows": 1}
    for name, least in limits.items():
        if (value := getattr(args, f"indexer_replay_{name}")) < least:
            flag = f"--indexer-replay-{name.replace('_', '-')}"
            raise ReplayConfigError(f"{flag}: expected at least {least}, got {value}; leave it out")
    if args.indexer_replay_missing != "error" and args.indexer_replay_pad_policy != "recompute":
        raise ReplayConfigError(
            f"--indexer-replay-missing {args.indexer_replay_missing}: expected --indexer-replay-pad-policy recompute, "
            f"got {args.indexer_replay_pad_policy}; rows without a capture are selected anew"
        )
    if args.indexer_replay_check_interval and args.indexer_replay_pad_policy != "recompute":
        raise ReplayConfigError(
            "--indexer-replay-check-interval: expected --indexer-replay-pad-policy recompute, got "
            f"{args.indexer_replay_pad_policy}; a check compares with fresh picks"
        )


def tickets_for(args: Namespace) -> str:
    """Why cursors will not do with these arguments; empty if they will."""
    return "combined 1F1B" if getattr(args, "overlap_moe_expert_parallel_comm", False) else ""


def spec_of(args: Namespace) -> ReplaySpec:
    """The spec of the checkpoint that `--hf-checkpoint` names.

    Raises:
        ReplayConfigError: a model without an indexer, or another number of streams than the flag says.
    """
    path = Path(args.hf_checkpoint) / "config.json"
    return _spec(path, getattr(args, "rollout_indexer_topk_num_streams", None))


@lru_cache(maxsize=8)
def _spec(path: Path, num_streams: int | None) -> ReplaySpec:
    config = json.loads(path.read_text())
    return indexer_spec(config.get("text_config", config), num_streams=num_streams)
