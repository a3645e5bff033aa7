# SPDX-License-Identifier: Apache-2.0
"""Every pipeline schedule, layer by layer: each layer gets the rows of its own microbatch, each once."""

from collections import Counter

import pytest
import torch
from schedules import events_of, layers_of

from vime_replay.errors import ReplayConfigError
from vime_replay.manager import ReplayManager
from vime_replay.memory import Microbatch, MicrobatchRows
from vime_replay.queues import ReplayQueueError
from vime_replay.schedule import ReplayTicket
from vime_replay.spec import ReplaySpec

LAYERS, ROWS, TOPK = 14, 3, 2
# As in DeepSeek-V4: every second layer, not the first.
OWNERS = range(2, LAYERS, 2)
RECOMPUTE = {
    "none": lambda layer: False,
    "selective": lambda layer: layer % 4 == 0,
    "full": lambda layer: True,
}
PIPELINES = [(pp, vpp) for pp in range(1, 5) for vpp in range(1, 4) if pp > 1 or vpp == 1]
CPU = torch.device("cpu")


class Failure(Exception):
    pass


def spec(streams=None):
    streams = streams or {layer: stream for stream, layer in enumerate(OWNERS)}
    return ReplaySpec("indexer", "rollout_indexer_topk", len(OWNERS), TOPK, streams, 4)


def rows_of(stream, microbatch):
    """Content that no other layer or microbatch has."""
    return torch.full((ROWS, TOPK), 100 * microbatch + stream, dtype=torch.int32)


class Rank:
    """One pipeline rank: its manager, filled for a step, and layers that note what they were given."""

    def __init__(self, pp, vpp, rank, microbatches, *, tickets, streams=None, uneven=0, **options):
        self.manager = ReplayManager(spec(streams), **options)
        self.chunks = layers_of(LAYERS, pp, vpp, rank, uneven)
        self.queues = {
            layer: self.manager.register(None, layer=layer, chunk=chunk)
            for chunk, layers in enumerate(self.chunks)
            for layer in layers
            if layer in OWNERS
        }
        self.tickets = [ReplayTicket(7, m) if tickets else None for m in range(microbatches)]
        self.used = Counter()
        self.fill()

    def fill(self):
        batches = []
        for m, ticket in enumerate(self.tickets):
            rows = [rows_of(stream, m) for stream in self.manager.streams]
            picks = torch.stack(rows) if rows else torch.empty(0, ROWS, TOPK, dtype=torch.int32)
            batches.append(Microbatch.of(MicrobatchRows(picks), ticket))
        self.manager.fill(batches)

    def ask(self, layer, microbatch, phase):
        def compute(rows, width):
            return torch.empty(len(rows), width, dtype=torch.int32)

        got = self.manager.select(
            self.queues[layer], compute, rows=ROWS, ticket=self.tickets[microbatch], device=CPU
        )
        stream = list(OWNERS).index(layer)
        assert got.equal(rows_of(stream, microbatch)), (
            f"layer {layer} got other rows in microbatch {microbatch}"
        )
        self.used[phase, layer, microbatch] += 1

    def forward(self, chunk, microbatch, order=1):
        for layer in self.chunks[chunk][::order]:
            if layer in self.queues:
                self.ask(layer, microbatch, "forward")

    def backward(self, chunk, microbatch, recomputed):
        for layer in reversed(self.chunks[chunk]):
            if layer in self.queues and recomputed(layer):
                self.ask(layer, microbatch, "backward")

    def step(self, events, recomputed, fail_at=None):
        """A training step, as the trainer runs it: one ambient stage, another one inside the forward step."""
        with self.manager.stage("replay_backward"):
            for number, (kind, chunk, microbatch) in enumerate(events):
                if number == fail_at:
                    raise Failure
                if kind == "F":
                    with self.manager.stage("replay_forward"):
                        self.forward(chunk, microbatch)
                else:
                    self.backward(chunk, microbatch, recomputed)

    def expected(self, recomputed):
        uses = {("forward", layer, m): 1 for layer in self.queues for m in range(len(self.tickets))}
        again = [layer for layer in self.queues if recomputed(layer)]
        return uses | {("backward", layer, m): 1 for layer in again for m in range(len(self.tickets))}


def consumption(recompute):
    return {"none": "none", "selective": "any", "full": "all"}[recompute]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("tickets", [False, True], ids=["cursors", "tickets"])
@pytest.mark.parametrize("pp, vpp", PIPELINES, ids=[f"pp{pp}-vpp{vpp}" for pp, vpp in PIPELINES])
def test_each_row_is_used_exactly_once(pp, vpp, tickets, recompute):
    recomputed = RECOMPUTE[recompute]
    for rank in range(pp):
        for microbatches in (pp, 3 * pp):
            stage = Rank(pp, vpp, rank, microbatches, tickets=tickets, uneven=pp > 1)
            events = events_of(pp, vpp, rank, microbatches)
            # Log-probabilities first, then training.
            with stage.manager.stage("replay_forward"):
                for kind, chunk, microbatch in events:
                    if kind == "F":
                        stage.forward(chunk, microbatch)
            stage.manager.assert_consumed(backward="none")
            stage.used.clear()
            stage.manager.begin_pass("backward" if recompute != "none" else "forward")
            stage.step(events, recomputed)
            assert stage.used == stage.expected(recomputed)
            stage.manager.assert_consumed(backward=consumption(recompute))


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("tickets", [False, True], ids=["cursors", "tickets"])
@pytest.mark.parametrize("pp, vpp", PIPELINES, ids=[f"pp{pp}-vpp{vpp}" for pp, vpp in PIPELINES])
def test_a_step_that_failed_is_repeated(pp, vpp, tickets, recompute):
    recomputed = RECOMPUTE[recompute]
    for rank in range(pp):
        events = events_of(pp, vpp, rank, 2 * pp)
        for fail_at in range(0, len(events), 5):
            stage = Rank(pp, vpp, rank, 2 * pp, tickets=tickets)
            with pytest.raises(Failure), stage.manager.transaction():
                stage.step(events, recomputed, fail_at)
            stage.used.clear()
            with stage.manager.transaction():
                stage.step(events, recomputed)
            assert stage.used == stage.expected(recomputed)
            stage.manager.assert_consumed(backward=consumption(recompute))


def combined(stage, events):
    """Layers of a forward and of a backward in turn, long after the forward step planned them."""
    pairs = list(zip(events, [*events[1:], None], strict=True))
    for (kind, chunk, microbatch), following in pairs:
        if kind == "F" and following is not None and following[0] == "B":
            _, back_chunk, back_microbatch = following
            ahead = [layer for layer in stage.chunks[chunk] if layer in stage.queues]
            back = [layer for layer in reversed(stage.chunks[back_chunk]) if layer in stage.queues]
            for pair in zip(ahead, back, strict=False):
                stage.ask(pair[0], microbatch, "forward")
                stage.ask(pair[1], back_microbatch, "backward")
            for layer in ahead[len(back) :]:
                stage.ask(layer, microbatch, "forward")
            for layer in back[len(ahead) :]:
                stage.ask(layer, back_microbatch, "backward")
        elif kind == "F":
            stage.forward(chunk, microbatch)


@pytest.mark.parametrize("pp, vpp", [(2, 1), (4, 1), (2, 3)], ids=["pp2", "pp4", "pp2-vpp3"])
def test_a_planned_schedule_works_with_tickets(pp, vpp):
    for rank in range(pp - 1):
        stage = Rank(pp, vpp, rank, 3 * pp, tickets=True, tickets_for="combined 1F1B")
        with stage.manager.stage("replay_backward"):
            combined(stage, events_of(pp, vpp, rank, 3 * pp))
        assert set(stage.used.values()) == {1}
        stage.manager.assert_consumed()


def test_a_planned_schedule_without_tickets_is_refused():
    stage = Rank(2, 1, 0, 4, tickets=False, tickets_for="combined 1F1B")
    with (
        stage.manager.stage("replay_backward"),
        pytest.raises(ReplayConfigError, match="combined 1F1B needs keyed replay tickets"),
    ):
        combined(stage, events_of(2, 1, 0, 4))


# Bugs that a schedule hides from shapes: what the rows say finds them.


def test_cursors_in_a_planned_schedule_would_give_other_rows():
    stage = Rank(2, 1, 0, 4, tickets=False)
    with stage.manager.stage("replay_backward"), pytest.raises(AssertionError, match="got other rows"):
        combined(stage, events_of(2, 1, 0, 4))


def test_one_cursor_for_both_phases_would_give_other_rows(monkeypatch):
    from vime_replay.queues import ReplayQueue

    monkeypatch.setattr(ReplayQueue, "_phase", lambda self, stage, key: "forward")
    stage = Rank(2, 1, 0, 4, tickets=False)
    with pytest.raises((AssertionError, ReplayQueueError)):
        stage.step(events_of(2, 1, 0, 4), RECOMPUTE["full"])


WRONG_MAPS = {
    "counted on the rank": {layer: (number - 3) % len(OWNERS) for number, layer in enumerate(OWNERS)},
    "in reverse": {layer: len(OWNERS) - 1 - number for number, layer in enumerate(OWNERS)},
}


@pytest.mark.parametrize("streams", WRONG_MAPS.values(), ids=WRONG_MAPS)
def test_a_wrong_stream_map_shows(streams):
    stage = Rank(2, 1, 1, 4, tickets=True, streams=streams)
    with pytest.raises(AssertionError, match="got other rows"):
        stage.step(events_of(2, 1, 1, 4), RECOMPUTE["full"])


def test_without_taking_back_a_repeated_step_runs_past_the_end():
    stage = Rank(2, 1, 0, 4, tickets=False)
    events = events_of(2, 1, 0, 4)
    with pytest.raises(Failure):
        stage.step(events, RECOMPUTE["full"], 5)
    with pytest.raises((AssertionError, ReplayQueueError)):
        stage.step(events, RECOMPUTE["full"])


def test_leftover_rows_are_named():
    stage = Rank(1, 1, 0, 3, tickets=True)
    with stage.manager.stage("replay_forward"):
        stage.forward(0, 0)
        stage.forward(0, 1)
    with pytest.raises(
        ReplayQueueError, match=r"not consumed exactly once: layer 2 forward 2/3 backward 0/3; layer 4"
    ):
        stage.manager.assert_consumed()
