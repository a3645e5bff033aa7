# SPDX-License-Identifier: Apache-2.0
"""The ranks of test_replay.py for pipelines: picks recorded by one process, replayed under Megatron's own schedule."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import DEVICE, serve
from layouts import LAYOUTS, NCCL_LAYOUTS, RECOMPUTATIONS
from replay_worker import at_random, indexers
from step import CONFIG, TABLES, Step, build, difference, load, microbatches, train_step, wrap

from vime_convert.tiny import make_tiny
from vime_models.dsv4.replay import attach_replay, replay_spec
from vime_models.dsv4.tiny import init_tiny
from vime_models.host.microbatch import VimePackedSeqParams
from vime_replay.manager import ReplayManager
from vime_replay.memory import Microbatch, MicrobatchRows
from vime_replay.schedule import ReplayTicket

HERE = Path(sys.argv[1])


@cache
def recorded() -> tuple[Step, list[Any]]:
    """What unsplit models compute from random picks, and these picks: [L, S, K] for each microbatch.

    The ranks are data parallel here, so each records its share.
    """
    chunks = build("float64")
    if dist.get_rank() == 0:
        make_tiny(CONFIG, HERE / "checkpoint", seed=0, table=TABLES[1], init=init_tiny)
    dist.barrier()
    load(chunks, HERE / "checkpoint")
    manager = ReplayManager(replay_spec(chunks[0].config.vime_dsv4))
    attach_replay(chunks, manager)
    # Another number for each call: picks of one microbatch are no picks of another.
    calls = count(100 * dist.get_rank())
    for indexer in indexers(chunks[0]):
        indexer.topk_fn = lambda *args, **keywords: at_random(next(calls), *args, **keywords)
    with manager.stage("record"):
        step = train_step(wrap(chunks), "float64")
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    picks = [batch.rows().picks_LSK for batch in manager.microbatches]
    shares: list[Any] = [None] * dist.get_world_size()
    own = {number: logits.cpu() for number, logits in step.logits.items()}
    dist.all_gather_object(shares, (own, step.losses, picks))
    for logits, losses, _ in shares:
        step.logits |= {number: each.to(DEVICE) for number, each in logits.items()}
        step.losses |= losses
    return step, [rows for turn in zip(*(share[2] for share in shares), strict=True) for rows in turn]


def replay_in_forward(chunk: Any, manager: ReplayManager, tickets: list[Any] | None) -> None:
    """What a trainer's forward step does: the stage around the forward, the ticket on the packing object."""
    stages, numbers = ExitStack(), count()

    def enter(_module: Any, args: Any, keywords: dict[str, Any]) -> Any:
        stages.enter_context(manager.stage("replay_forward"))
        if tickets:
            keywords |= {"packed_seq_params": VimePackedSeqParams(replay_ticket=tickets[next(numbers)])}
        return args, keywords

    chunk.register_forward_pre_hook(enter, with_kwargs=True)
    chunk.register_forward_hook(lambda *_: stages.close(), always_call=True)


def replayed(layout: str, tickets: bool, recompute: str = "", mistake: str = "") -> dict[str, Any]:
    """How far a step that replays the picks is from the recording."""
    expected, picks = recorded()
    options = (LAYOUTS | NCCL_LAYOUTS)[layout][1] | (RECOMPUTATIONS[recompute] if recompute else {})
    chunks = load(build("float64", **options), HERE / "checkpoint")
    spec = replay_spec(chunks[0].config.vime_dsv4)
    if mistake == "streams in reverse":
        last = spec.num_streams - 1
        spec = replace(spec, stream_of_layer={layer: last - s for layer, s in spec.stream_of_layer.items()})
    manager = ReplayManager(spec)
    attach_replay(chunks, manager)
    names = [ReplayTicket(0, number) if tickets else None for number in range(len(microbatches()))]
    # Microbatches come in pairs of one length, so the number of rows does not tell.
    swapped = [names[number ^ 1] for number in range(len(names))]
    order = swapped if mistake == "tickets of other microbatches" else names
    manager.fill(
        Microbatch.of(MicrobatchRows(rows[list(manager.streams)]), ticket)
        for rows, ticket in zip(picks, order, strict=True)
    )
    wrapped = wrap(chunks)
    for chunk in chunks:
        replay_in_forward(chunk, manager, names if tickets else None)
    with manager.stage("replay_backward"):
        step = train_step(wrapped, "float64")
    manager.assert_consumed(backward="all" if recompute == "full" else "none")
    return difference(step, expected) | {"queues": [(q.layer, q.stream, q.chunk) for q in manager.queues]}


CASES = {
    **{
        f"pp2-{'tickets' if tickets else 'cursors'}{f'-{recompute}' if recompute else ''}": partial(
            replayed, "pp2-3+2", tickets, recompute
        )
        for tickets in (False, True)
        for recompute in ("", "full", "moe")
    },
    **{
        f"vpp2-{'tickets' if tickets else 'cursors'}-full": partial(replayed, "pp2-vpp2", tickets, "full")
        for tickets in (False, True)
    },
    "planted-streams": partial(replayed, "pp2-3+2", True, "full", "streams in reverse"),
    "planted-tickets": partial(replayed, "pp2-3+2", True, "full", "tickets of other microbatches"),
}

if __name__ == "__main__":
    serve(CASES)
