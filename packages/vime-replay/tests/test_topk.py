# SPDX-License-Identifier: Apache-2.0
"""Selection that looks at ranges first, and wrapped selections: whole, in chunks, batched, with values."""

import numpy as np
import packing
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_replay.errors import ReplayConfigError
from vime_replay.layout import PackLayout
from vime_replay.manager import ReplayManager
from vime_replay.memory import Microbatch, MicrobatchRows
from vime_replay.queues import ReplayQueueError
from vime_replay.schedule import ReplayTicket
from vime_replay.topk import masked_topk

TICKET = ReplayTicket(0, 0)


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 6), columns=st.integers(0, 12), k=st.integers(1, 15)
)
def test_masked_topk_equals_sorting_each_row_by_hand(seed, rows, columns, k):
    """Few distinct scores, so that ties decide; garbage outside the ranges."""
    rng = np.random.default_rng(seed)
    scores = rng.choice([-1.0, 0.0, -0.0, 2.0, np.inf, -np.inf, np.nan], (rows, columns))
    starts, ends = rng.integers(-2, columns + 3, (2, rows))
    found = masked_topk(torch.from_numpy(scores), k, torch.from_numpy(starts), torch.from_numpy(ends))
    for row in range(rows):
        legal = [c for c in range(columns) if starts[row] <= c < ends[row]]
        legal = [c for c in legal if not np.isnan(scores[row, c]) and scores[row, c] != -np.inf]
        best = sorted(sorted(legal, key=lambda c, row=row: (-scores[row, c], c))[:k])
        assert found[row].tolist() == best + [-1] * (k - len(best))
    assert found.dtype == torch.int32


def test_masked_topk_leaves_the_scores_alone():
    scores = torch.tensor([[3.0, float("nan"), 1.0]])
    before = scores.clone()
    masked_topk(scores, 1, torch.tensor([1]), torch.tensor([3]))
    assert scores.equal(before) or scores.isnan().equal(before.isnan())


class Layer(torch.nn.Module):
    """Selects the k best columns of what it is given, all rows at once or in chunks."""

    def __init__(self, topk, k, chunk=None):
        super().__init__()
        self.topk, self.k, self.chunk = topk, k, chunk

    def forward(self, scores, packed_seq_params=None):
        if self.chunk is None:
            return self.topk(scores, self.k)
        parts = scores.split(self.chunk)
        return torch.cat([self.topk(p, self.k, row_offset=i * self.chunk) for i, p in enumerate(parts)])


class Packed:
    replay_ticket = TICKET


def native(scores, k, **ignored):
    return scores.topk(k, dim=-1).indices.to(torch.int32)


def managed(k=3, chunk=None, fn=native, topk=3, **options):
    manager = ReplayManager(packing.spec_of(streams=1, topk=topk), **options)
    layer = Layer(manager.wrap_topk(fn), k, chunk)
    manager.register(layer, layer=1)
    return manager, layer


SCORES, OTHER = torch.rand(2, 10, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("chunk", [None, 4], ids=["whole", "chunks"])
@pytest.mark.parametrize("packed", [None, Packed()], ids=["cursor", "ticket"])
def test_a_wrapped_selection_replays_what_it_recorded(chunk, packed):
    manager, layer = managed(chunk=chunk)
    assert layer(OTHER).equal(native(OTHER, 3))
    with manager.stage("record"):
        recorded = layer(SCORES, packed_seq_params=packed)
    assert recorded.equal(native(SCORES, 3))
    assert [batch.shape for batch in manager.microbatches] == [(1, 10, 3)]
    with manager.stage("replay_backward"), manager.stage("replay_forward"):
        assert layer(OTHER, packed_seq_params=packed).equal(recorded)
    with manager.stage("replay_backward"):
        assert layer(OTHER, packed_seq_params=packed).equal(recorded)
    manager.assert_consumed(backward="all")


@pytest.mark.parametrize("chunk", [None, 4], ids=["whole", "chunks"])
def test_rows_without_picks_are_selected_natively(chunk):
    manager, layer = managed(chunk=chunk)
    rows = packing.random_rows(np.random.default_rng(0), 8, manager.spec, full=True)
    manager.fill([manager.pack([rows], PackLayout((8,), pad_multiple=10))])
    with manager.stage("replay_forward"):
        picks = layer(OTHER)
    # The last token, and padding up to ten rows.
    assert picks[7:].equal(native(OTHER, 3)[7:])
    assert [sorted(row) for row in picks[:7].tolist()] == [sorted(row) for row in rows[:, 0].tolist()]


def test_batched_scores_take_rows_batch_by_batch():
    manager, layer = managed()
    scores = SCORES.view(2, 5, 8)
    with manager.stage("record"):
        layer(scores)
    with manager.stage("replay_forward"):
        assert layer(OTHER.view(2, 5, 8)).equal(native(scores, 3))


def test_values_are_gathered_at_the_picks_and_never_at_minus_one():
    manager = ReplayManager(packing.spec_of(streams=1, topk=3), pad_policy="empty")
    pair = manager.wrap_topk(lambda scores, k: scores.topk(k), return_values=True)
    layer = Layer(pair, 3)
    manager.register(layer, layer=1)
    picks = torch.tensor([[2, 0, -1], [-1, -1, -1]], dtype=torch.int32)
    manager.fill([Microbatch.of(MicrobatchRows(picks[None]))])
    scores = torch.tensor([[1.0, 5.0, 3.0], [7.0, 8.0, 9.0]], requires_grad=True)
    with manager.stage("replay_forward"):
        values, chosen = layer(scores)
    assert chosen.equal(picks)
    assert values.tolist() == [[3.0, 1.0, float("-inf")], [float("-inf")] * 3]
    values.masked_fill(picks < 0, 0.0).sum().backward()
    assert scores.grad.tolist() == [[1.0, 0.0, 1.0], [0.0] * 3]


@pytest.mark.parametrize(
    "width, k, message", [(4, 2, "2 picks, got 4 columns with picks behind column 2"), (2, 4, "")]
)
def test_rows_of_another_width(width, k, message):
    """Wider rows may lose columns that hold nothing, narrower ones get such columns."""
    manager, layer = managed(k=k, topk=4)
    with manager.stage("record"):
        manager.running.clear()
        manager.record(manager.queues[0], native(SCORES, width), None)
    with manager.stage("replay_forward"):
        if message:
            with pytest.raises(ReplayQueueError, match=message):
                layer(SCORES)
        else:
            assert layer(SCORES).equal(torch.nn.functional.pad(native(SCORES, 2), (0, 2), value=-1))
    assert not manager.running, "a layer that failed is still running"


def test_a_layer_that_fails_half_way_records_nothing():
    def failing(scores, k, row_offset=0):
        if row_offset == 4:
            raise KeyError
        return native(scores, k)

    manager, layer = managed(chunk=4, fn=failing)
    with manager.stage("record"), pytest.raises(KeyError):
        layer(SCORES)
    assert manager.microbatches == []
    assert manager.running == []


def test_columns_that_hold_nothing_are_dropped():
    manager, layer = managed(k=2, topk=4)
    rows = torch.nn.functional.pad(native(SCORES, 2), (0, 2), value=-1)
    manager.fill([Microbatch.of(MicrobatchRows(rows[None]))])
    with manager.stage("replay_forward"):
        assert layer(SCORES).equal(native(SCORES, 2))


def test_a_schedule_that_needs_tickets_says_so():
    manager, layer = managed(tickets_for="combined 1F1B")
    for stage in ("record", "replay_forward"):
        with (
            manager.stage(stage),
            pytest.raises(ReplayConfigError, match="combined 1F1B needs keyed replay tickets"),
        ):
            layer(SCORES)


def test_chunks_that_leave_out_rows_are_refused():
    """Rows of another layout than the module's: every chunk finds rows, the last ones are never asked for."""
    spec = packing.spec_of(streams=1, topk=2, ratio=1)
    manager = ReplayManager(spec)

    class Module(torch.nn.Module):
        def forward(self, count):
            topk = manager.wrap_topk(lambda scores, k, row_offset: scores.topk(k).indices.int())
            return [topk(torch.rand(2, 6), 2, row_offset=at) for at in range(0, count, 2)]

    module = Module()
    manager.register(module, layer=spec.layer_ids[0])
    manager.fill([manager.pack([packing.newest_first(6, spec)], PackLayout((6,)))])
    with manager.stage("replay_forward"):
        assert len(module(6)) == 3
        manager.rewind_forward()
        with pytest.raises(ReplayQueueError, match="replay has 6 rows, scores have 4"):
            module(4)
