# SPDX-License-Identifier: Apache-2.0
"""The manager: stages, what is computed and what is replayed, registration, messages, checks."""

import pickle
import subprocess
import sys

import numpy as np
import packing
import pytest
import torch

from vime_replay.errors import ReplayConfigError
from vime_replay.layout import PackLayout
from vime_replay.manager import ReplayManager
from vime_replay.memory import Microbatch, MicrobatchRows
from vime_replay.queues import ReplayQueueError
from vime_replay.schedule import ReplayTicket, Stage, ticket_of

CPU = torch.device("cpu")
LENGTHS = (9, 1, 6)
LAYOUT = PackLayout(LENGTHS, pad_multiple=4)


@pytest.fixture
def spec():
    return packing.spec_of(streams=2, topk=3, ratio=1)


@pytest.fixture
def rows(spec):
    rng = np.random.default_rng(0)
    return [packing.random_rows(rng, n, spec, full=True) for n in LENGTHS]


class Layers:
    """Registered layers that count how often, and for which rows, they select."""

    def __init__(self, spec, **options):
        self.manager = ReplayManager(spec, **options)
        self.queues = [self.manager.register(None, layer=layer) for layer in spec.layer_ids]
        self.computed = []

    def ask(self, number=0, ticket=None, rows=LAYOUT.local_rows, fill=77, scores=None):
        def compute(wanted, width):
            self.computed.append(None if wanted is None else wanted.tolist())
            count = rows if wanted is None else len(wanted)
            return torch.full((count, width or 3), fill, dtype=torch.int32)

        queue = self.queues[number]
        return self.manager.select(queue, compute, rows=rows, ticket=ticket, device=CPU, scores=scores)


def test_only_rows_without_picks_are_computed(spec, rows):
    layers = Layers(spec)
    layers.manager.fill([layers.manager.pack(rows, LAYOUT)])
    unrecorded = [8, 9, 15]  # the last token of each sample: nobody predicted anything with it
    expected = packing.packed(
        packing.stream_of(LENGTHS, mode="contiguous", cp=1, pad_multiple=4)[0][0],
        rows,
        LENGTHS,
        LENGTHS,
        ratio=1,
        key_space="padded",
    )
    with layers.manager.stage("replay_forward"):
        for stream in range(2):
            picks = layers.ask(stream).numpy()
            assert layers.computed.pop() == unrecorded
            assert (picks[unrecorded] == 77).all()
            recorded = np.delete(np.arange(16), unrecorded)
            assert [sorted(row) for row in picks[recorded]] == [sorted(r) for r in expected[stream, recorded]]


def test_the_host_keeps_what_was_recorded(spec, rows):
    """Filled-in rows are not written back: the next pass has other scores."""
    layers = Layers(spec)
    layers.manager.fill([layers.manager.pack(rows, LAYOUT)])
    with layers.manager.stage("replay_forward"):
        assert (layers.ask()[8] == 77).all()
    assert (layers.manager.microbatches[0].rows().picks_LSK[0, 8] == -1).all()


@pytest.mark.parametrize("policy", ["self", "empty"])
def test_without_recomputation_nothing_is_computed(spec, rows, policy):
    layers = Layers(spec, pad_policy=policy)
    layers.manager.fill([layers.manager.pack(rows, LAYOUT)])
    with layers.manager.stage("replay_forward"):
        picks = layers.ask()
    assert layers.computed == []
    # Last tokens see themselves: rows of the key tensor, samples end to end.
    assert picks[[8, 9, 15]].tolist() == [[own if policy == "self" else -1, -1, -1] for own in (8, 9, 15)]


@pytest.mark.parametrize(
    "enabled, stage", [(True, "fallthrough"), (False, "replay_forward")], ids=["off", "critic"]
)
def test_a_layer_selects_natively(spec, enabled, stage):
    layers = Layers(spec)
    layers.manager.enabled = enabled
    with layers.manager.stage(stage):
        layers.ask()
    assert layers.computed == [None]


@pytest.mark.parametrize("tickets", [False, True], ids=["cursors", "tickets"])
def test_recorded_picks_come_back_forward_and_backward(spec, tickets):
    layers = Layers(spec)
    names = [ReplayTicket(0, m) if tickets else None for m in range(2)]

    def content(microbatch, number):
        return 10 * microbatch + number

    with layers.manager.stage("record"):
        for m, ticket in enumerate(names):
            for number in range(2):
                layers.ask(number, ticket, fill=content(m, number))
    assert [batch.shape for batch in layers.manager.microbatches] == [(2, 16, 3)] * 2
    for stage in ("replay_forward", "replay_backward"):
        with layers.manager.stage(stage):
            # Cursors keep the order of microbatches, tickets need none.
            for m in (1, 0) if tickets else (0, 1):
                for number in (1, 0):
                    assert (layers.ask(number, names[m]) == content(m, number)).all()
    layers.manager.assert_consumed(backward="all")
    # Recorded rows are complete: asked for no row, but asked, because ranks communicate.
    assert layers.computed == [None] * 4 + [[]] * 8


def test_a_recording_that_skips_a_layer_is_found(spec):
    layers = Layers(spec)
    with layers.manager.stage("record"):
        layers.ask(0)
    with pytest.raises(ReplayQueueError, match=r"queues disagree: \{1: 1, 3: 0\}"):
        layers.manager.rewind_forward()


def test_stages_nest_and_come_back_after_an_error(spec):
    manager = ReplayManager(spec)
    with manager.stage("replay_backward"):
        with pytest.raises(KeyError), manager.stage("replay_forward"):
            raise KeyError
        assert manager.current_stage is Stage.REPLAY_BACKWARD
    assert manager.current_stage is Stage.FALLTHROUGH
    with pytest.raises(ValueError, match="replay_sideways"):
        manager.set_stage("replay_sideways")


def test_messages_of_a_queue(spec, rows):
    layers = Layers(spec)
    layers.manager.fill([layers.manager.pack(rows, LAYOUT, ticket=ReplayTicket(4, 0))])
    with layers.manager.stage("replay_forward"):
        with pytest.raises(
            ReplayQueueError, match=r"replay has 16 rows, scores have 12; check CP/SP/padding layout"
        ):
            layers.ask(rows=12)
        layers.ask()  # the rows that did not fit have not been used
        with pytest.raises(
            ReplayQueueError,
            match=r"layer 1 \(stream 0\) popped replay_forward #1 but only 1 microbatches .*; shapes \[\(16, 3\)\]",
        ):
            layers.ask()
        with pytest.raises(ReplayQueueError, match=r"has no rows for ReplayTicket\(step=3, microbatch=0\)"):
            layers.ask(ticket=ReplayTicket(3, 0))


def test_registration(spec):
    manager = ReplayManager(spec)
    queue = manager.register(None, layer=3)
    assert (queue.layer, queue.stream, queue.chunk, manager.streams) == (3, 1, 0, (1,))
    with pytest.raises(ReplayConfigError, match="layer 3 of chunk 0 is registered twice"):
        manager.register(None, layer=3)
    with pytest.raises(
        ReplayConfigError, match=r"layer 2: expected one of the layers with a replay stream \[1, 3\]"
    ):
        manager.register(None, layer=2)


@pytest.mark.parametrize("enabled", [True, False], ids=["actor", "critic"])
def test_draft_layers_do_not_register_and_a_critic_stays_one(spec, enabled):
    manager = ReplayManager(spec, enabled=enabled)
    with manager.suspend_registration():
        assert manager.register(None, layer=1) is None
    assert manager.enabled is enabled
    assert (manager.register(None, layer=1) is not None) is enabled


def test_a_disabled_manager_hooks_nothing(spec):
    module = torch.nn.Identity()
    ReplayManager(spec, enabled=False).register(module, layer=1)
    assert not module._forward_pre_hooks
    assert not module._forward_hooks


def test_fill_counts_and_refuses_other_streams(spec, rows):
    layers = Layers(spec)
    report = layers.manager.fill([layers.manager.pack(rows, LAYOUT) for _ in range(3)])
    assert (report.microbatches, report.rows, report.redone_rows) == (3, 48, 9)
    assert report.nbytes == 3 * 2 * 16 * 3 * 4
    other = Microbatch.of(MicrobatchRows(torch.zeros(1, 16, 3, dtype=torch.int32)))
    with pytest.raises(ReplayConfigError, match=r"expected rows of 2 streams \(0, 1\), got 1"):
        layers.manager.fill([other])


def test_a_stage_without_indexers_is_filled_with_nothing(spec, rows):
    manager = ReplayManager(spec)
    assert manager.fill([manager.pack(rows, LAYOUT)]).nbytes == 0
    manager.begin_pass()
    manager.assert_consumed(backward="all")


def test_clear_makes_room_for_the_next_step(spec, rows):
    layers = Layers(spec)
    for _ in range(2):
        layers.manager.fill([layers.manager.pack(rows, LAYOUT)])
        with layers.manager.stage("replay_forward"):
            layers.ask(0)
            layers.ask(1)
        layers.manager.assert_consumed()
        layers.manager.clear()
    assert layers.manager.microbatches == []


def test_a_check_gets_a_sample_of_replayed_and_fresh_picks(spec, rows):
    seen = []
    layers = Layers(spec, check=lambda *each: seen.append(each), check_rows=4)
    layers.manager.fill([layers.manager.pack(rows, LAYOUT)])
    with layers.manager.stage("replay_forward"):
        picks = layers.ask(1)
    ((layer, batch, sampled, replayed, fresh, scores),) = seen
    assert (layer, batch, sampled.tolist()) == (3, layers.manager.microbatches[0], [2, 6, 10, 14])
    assert layers.computed == [[8, 9, 15, 2, 6, 10, 14]]
    assert replayed.tolist() == picks[[2, 6, 10, 14]].tolist()
    assert (fresh == 77).all()
    assert scores is None
    with pytest.raises(ReplayConfigError, match="expected pad_policy 'recompute' with a check"):
        ReplayManager(spec, pad_policy="empty", check=print)


def test_a_layer_that_tells_its_scores_is_asked_for_those_of_the_sampled_rows(spec, rows):
    seen, asked = [], []
    layers = Layers(spec, check=lambda *each: seen.append(each), check_rows=4)
    layers.manager.fill([layers.manager.pack(rows, LAYOUT)])

    def scores(sampled):
        asked.append(sampled.tolist())
        return torch.arange(100.0).expand(len(sampled), 100) / 10

    with layers.manager.stage("replay_forward"):
        layers.ask(1, scores=scores)
    assert asked == [[2, 6, 10, 14]]
    (*_, replayed, fresh, (of_fresh, of_replayed, log_mass)) = seen[0]
    assert of_fresh.equal(fresh / 10)
    assert of_replayed.equal((replayed / 10).masked_fill(replayed < 0, float("-inf")))
    assert log_mass.tolist() == pytest.approx([(torch.arange(100.0) / 10).logsumexp(0).item()] * 4)


@pytest.mark.parametrize("keys", [0, 50])
def test_picks_of_keys_that_are_not_there_have_no_score(spec, rows, keys):
    """Unvalidated picks may name them; the attention takes them for no pick."""
    seen = []
    layers = Layers(spec, check=lambda *each: seen.append(each), check_rows=4)
    layers.manager.fill([layers.manager.pack(rows, LAYOUT)])
    with layers.manager.stage("replay_forward"):
        layers.ask(1, scores=lambda sampled: torch.ones(len(sampled), keys))
    (*_, fresh, (of_fresh, of_replayed, _)) = seen[0]
    assert (fresh == 77).all()
    assert (of_fresh == float("-inf")).all()
    assert (of_replayed == float("-inf")).all() == (keys == 0)


def test_tickets_are_values():
    ticket = ReplayTicket(2, 5)
    assert pickle.loads(pickle.dumps(ticket)) == ticket
    assert hash(ReplayTicket(2, 5)) == hash(ticket)
    assert ticket_of(None) is None


def test_picks_may_keep_the_order_in_which_they_were_recorded(spec, rows):
    layers = Layers(spec, order="keep", pad_policy="empty")
    layers.manager.fill([layers.manager.pack(rows, LAYOUT)])
    with layers.manager.stage("replay_forward"):
        assert layers.ask(1)[:8].tolist() == rows[0][:, 1].tolist()


def test_without_torch_the_message_names_the_extra():
    code = "import sys; sys.modules['torch'] = None; import vime_replay.manager"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'vime-replay[torch]'" in done.stderr


def test_two_microbatches_with_one_ticket_are_refused(spec, rows):
    layers = Layers(spec)
    batches = [layers.manager.pack(rows, LAYOUT, ticket=ReplayTicket(0, 0)) for _ in range(2)]
    with pytest.raises(ReplayConfigError, match="microbatch 1: expected a ticket of its own"):
        layers.manager.fill(batches)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pad_policy": "zeros"}, "pad_policy: expected one of recompute, self, empty, got 'zeros'"),
        ({"check_rows": 0}, "check_rows: expected at least 1, got 0"),
    ],
    ids=["pad-policy", "check-rows"],
)
def test_a_manager_refuses_what_it_does_not_know(spec, options, message):
    with pytest.raises(ReplayConfigError, match=message):
        ReplayManager(spec, **options)
