# SPDX-License-Identifier: Apache-2.0
"""Microbatches that are packed when needed: how many are in memory, when they go, and how failures come out."""

import threading

import numpy as np
import packing
import pytest
import torch

from vime_replay.errors import ReplayConfigError
from vime_replay.layout import PackLayout
from vime_replay.manager import ReplayManager
from vime_replay.memory import Microbatch, MicrobatchRows, Slot, Window
from vime_replay.pack import pack_rows
from vime_replay.padding import own_keys, pad_rows

SHAPE = (2, 3, 4)


class Packer:
    """Counts how often each microbatch is packed."""

    def __init__(self, count):
        self.calls = [0] * count
        self.threads = set()

    def batch(self, number):
        def pack():
            self.calls[number] += 1
            self.threads.add(threading.current_thread().name)
            return MicrobatchRows(torch.full(SHAPE, number, dtype=torch.int32))

        return Microbatch(pack, SHAPE)


def windowed(count, ahead):
    packer, window = Packer(count), Window(ahead)
    return packer, window, [window.add(packer.batch(number)) for number in range(count)]


def use(window, batch, phase, layers=range(2)):
    for layer in layers:
        assert (Slot(batch, layer).picks == window.batches.index(batch)).all()
        window.used(Slot(batch, layer), phase)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_forward_pass_packs_each_microbatch_once_and_drops_it(ahead):
    packer, window, batches = windowed(5, ahead)
    window.begin_pass("forward")
    for number, batch in enumerate(batches):
        use(window, batch, "forward")
        assert batch._packed is None
        assert sum(each._packed is not None or each._future is not None for each in batches) <= ahead
        assert packer.calls[number] == 1
    window.close()
    assert packer.calls == [1] * 5
    assert all(name.startswith("vime-replay") for name in packer.threads) == (ahead > 0)


def test_training_holds_a_microbatch_until_backward_used_it():
    packer, window, batches = windowed(4, 1)
    window.begin_pass("backward")
    for kind, number in [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3)]:
        use(window, batches[number], {"F": "forward", "B": "backward"}[kind])
    window.close()
    assert packer.calls == [1] * 4


def test_the_next_pass_packs_again():
    packer, window, batches = windowed(3, 1)
    for _ in range(2):
        window.begin_pass("forward")
        for batch in batches:
            use(window, batch, "forward")
    window.close()
    window.close()
    assert packer.calls == [2] * 3


def test_a_failed_packing_is_raised_where_the_rows_are_asked_for():
    def broken():
        raise OSError("file is gone")

    window = Window(1)
    batch = window.add(Microbatch(broken, SHAPE))
    window.begin_pass("forward")
    with pytest.raises(OSError, match="file is gone"):
        batch.rows()
    window.close()


def test_other_rows_than_announced_are_refused():
    batch = Microbatch(lambda: MicrobatchRows(torch.zeros(2, 5, 4, dtype=torch.int32)), SHAPE)
    with pytest.raises(ReplayConfigError, match=r"expected shape \(2, 3, 4\), got \(2, 5, 4\)"):
        batch.rows()


def test_closing_does_not_wait_for_rows_that_nobody_wants():
    _, window, batches = windowed(50, 49)
    window.begin_pass("forward")
    batches[0].rows()
    window.close()
    assert window.batches == []


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
def test_a_manager_packs_lazily_in_a_training_step(recompute):
    spec = packing.spec_of(streams=2, topk=3)
    rng = np.random.default_rng(0)
    samples = [
        [packing.random_rows(rng, n, spec) for n in lengths] for lengths in [(7, 5), (9,), (4, 4, 4), (12,)]
    ]
    manager, eager = ReplayManager(spec, pad_policy="empty"), ReplayManager(spec, pad_policy="empty")
    window = Window(1)
    for each in (manager, eager):
        for layer in spec.layer_ids:
            each.register(None, layer=layer)
    layouts = [PackLayout(tuple(len(rows) + 1 for rows in batch), pad_multiple=12) for batch in samples]
    # Every real row has a pick: with this policy nothing may be missing.
    samples = [[np.where(rows.max(-1, keepdims=True) < 0, 0, rows) for rows in batch] for batch in samples]
    pairs = list(zip(samples, layouts, strict=True))
    manager.fill((window.add(manager.pack(s, layout, lazily=True)) for s, layout in pairs), window)
    eager.fill(eager.pack(s, layout) for s, layout in pairs)
    manager.begin_pass("backward" if recompute else "forward")
    for m in range(4):
        for queue, twin in zip(manager.queues, eager.queues, strict=True):
            for stage in ("replay_forward", "replay_backward")[: 1 + recompute]:
                picks = []
                for each, its in ((manager, queue), (eager, twin)):
                    with each.stage(stage):
                        picks.append(each.replayed(its, 12, None, torch.device("cpu"))[1].clone())
                assert picks[0].equal(picks[1]), m
    assert all(batch._packed is None for batch in window.batches)
    manager.clear()
    assert window.batches == []


# Rows without picks.


@pytest.mark.parametrize("key_space", ["padded", "compact"])
def test_own_keys_are_causal_keys_of_the_same_segment(key_space):
    layout = PackLayout((5, 3, 7), mode="zigzag", cp_size=2, pad_multiple=4, key_space=key_space)
    owners = list(zip(*layout.owners(), strict=True))
    offsets = layout.key_offsets(1).tolist()
    for (sample, position), key in zip(owners, own_keys(layout, 1).tolist(), strict=True):
        if sample >= 0:
            newest = position if key_space == "padded" else min(position, layout.lengths[sample] - 1)
            assert key == offsets[sample] + newest
        else:
            assert key == (20 + position if key_space == "padded" else 14)
    assert set(own_keys(layout, 4).tolist()) <= set(range(-1, 6))


def test_own_keys_of_a_batch_count_in_each_row():
    layout = PackLayout((5, 3), "bshd", key_space="sample")
    assert own_keys(layout, 1).tolist() == [0, 1, 2, 3, 4] * 2


def test_rows_that_see_nothing_yet_stay_empty_and_holes_are_computed():
    spec = packing.spec_of(streams=2, topk=3, ratio=4)
    rows = np.stack([packing.newest_first(13, packing.spec_of(topk=3, ratio=4))[:, 0]] * 2, 1)
    rows[7, 1] = -1
    packed = pack_rows([rows], spec, PackLayout((13,), pad_multiple=16))
    batch = pad_rows(packed, torch.from_numpy(packed.picks_LSK))
    # Rows 0 to 2 have no complete group before them; 12 is the last token; three rows are padding.
    assert [each.tolist() for each in batch.redo] == [[12, 13, 14, 15], [7, 12, 13, 14, 15]]
    for policy in ("self", "empty"):
        with pytest.raises(ReplayConfigError, match="got 1 rows without, first local row 7 of stream 1"):
            pad_rows(packed, torch.from_numpy(packed.picks_LSK), policy)


def test_layers_share_the_list_of_rows_to_compute():
    spec = packing.spec_of(streams=3, topk=3)
    rows = np.repeat(packing.newest_first(9, packing.spec_of(topk=3)), 3, 1)
    packed = pack_rows([rows], spec, PackLayout((9,)))
    redo = pad_rows(packed, torch.from_numpy(packed.picks_LSK)).redo
    assert redo[0] is redo[1] is redo[2]


def test_columns_that_no_row_can_fill_are_left_out():
    spec = packing.spec_of(topk=8, ratio=4)
    rows = packing.newest_first(13, spec)
    for total, width in ((13, 3), (32, None)):
        packed = pack_rows([rows], spec, PackLayout((13,), pad_multiple=total))
        batch = Microbatch.of(pad_rows(packed, torch.from_numpy(packed.picks_LSK)))
        assert batch.rows().width == width
        assert Slot(batch, 0).picks.shape == (total, width or 8)
