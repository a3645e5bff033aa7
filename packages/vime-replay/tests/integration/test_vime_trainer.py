# SPDX-License-Identifier: Apache-2.0
"""vime's trainer side: from the rollout's column to what each layer is given in each pass."""

from types import SimpleNamespace

import pytest
import torch
from rollouts import Chunk, expected_picks, rollout

LAYOUTS = {
    "one-rank": ((), 1, 0, "zigzag"),
    "zigzag": ((), 2, 1, "zigzag"),
    "contiguous": (("--allgather-cp",), 2, 1, "contiguous"),
}


@pytest.mark.parametrize("recompute", [(), ("--recompute-granularity", "full")], ids=["plain", "recompute"])
@pytest.mark.parametrize("spilled", ["none", "some", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layer_is_given_the_servers_picks(parse, server, layout, spilled, recompute, monkeypatch):
    from vime.backends.megatron_utils import data as fake_data  # noqa: TID251
    from vime.backends.megatron_utils.actor import MegatronTrainRayActor  # noqa: TID251
    from vime.ray.rollout import RolloutManager  # noqa: TID251

    from vime_replay.integrations.vime import IndexerReplay, Parallel, make_manager

    words, cp, rank, mode = LAYOUTS[layout]
    monkeypatch.setattr(fake_data.PARALLEL, "cp_size", cp)
    args = parse("--data-pad-size-multiplier", "8", *words, *recompute)
    samples = rollout(args, server, spilled)
    ray = RolloutManager([[2, 0, 4, 1, 3]])
    (data,) = ray._split_train_data_by_dp(ray._convert_samples_to_train_data(samples))
    data |= {"micro_batch_indices": [[0, 3], [4], [1, 2]], "num_microbatches": [2, 1]}
    manager = make_manager(args)
    chunks = [Chunk(manager, 0, [1]), Chunk(manager, 1, [3, 4])]
    replay = IndexerReplay(args, manager, Parallel(cp, rank))
    MegatronTrainRayActor(args, chunks, replay).train_actor(0, data)
    assert "rollout_indexer_topk" not in data
    seen = [each for chunk in chunks for each in chunk.seen]
    stages = [stage for stage, *_ in seen]
    passes = {"fallthrough": 1, "replay_forward": 2, "replay_backward": int(bool(recompute))}
    assert {stage: stages.count(stage) for stage in passes} == {s: 3 * 3 * n for s, n in passes.items()}
    for stage, layer, tokens, picks in seen:
        if stage != "fallthrough":
            wanted = expected_picks(server, samples, tokens, layer, mode=mode, cp=cp, rank=rank, multiple=8)
            assert [sorted(row) for row in picks.tolist()] == wanted, (stage, layer, tokens)
    assert manager.microbatches == []


def test_the_manager_is_what_the_flags_say(parse):
    from vime_replay.integrations.vime import make_manager

    args = parse("--indexer-replay-pad-policy", "empty", "--indexer-replay-order", "keep")
    manager = make_manager(args)
    assert (manager.enabled, manager.pad_policy, manager.order, manager.tickets_for) == (
        True,
        "empty",
        "keep",
        "",
    )
    args.overlap_moe_expert_parallel_comm = True
    assert make_manager(args).tickets_for == "combined 1F1B"
    assert not make_manager(args, "critic").enabled


@pytest.mark.parametrize("spilled", ["none", "all"])
def test_rows_on_disk_are_read_when_a_layer_needs_them(parse, server, spilled):
    from vime.backends.megatron_utils.data import DataIterator  # noqa: TID251

    from vime_replay.integrations.vime import IndexerReplay, Parallel, make_manager

    args = parse("--indexer-replay-prefetch-microbatches", "0")
    samples = rollout(args, server, spilled)[:3]
    rows = [sample.rollout_indexer_topk for sample in samples]
    data = {"tokens": [sample.tokens for sample in samples], "rollout_indexer_topk": rows}
    manager = make_manager(args)
    manager.register(None, layer=3)
    IndexerReplay(args, manager, Parallel()).fill(
        [DataIterator(data, micro_batch_indices=[[0], [1, 2]])], [2], data
    )
    assert [batch._packed is None for batch in manager.microbatches] == [spilled == "all"] * 2
    # The trainer's list no longer holds any rows.
    assert rows == [None] * 3
    manager.clear()


def test_missing_rows_are_named(parse):
    from vime_replay.errors import ReplayDecodeError
    from vime_replay.integrations.vime import IndexerReplay, Parallel, fill_indexer_replay, spec_of
    from vime_replay.manager import ReplayManager

    args = parse()
    actor = SimpleNamespace(indexer_replay=IndexerReplay(args, ReplayManager(spec_of(args)), Parallel()))
    with pytest.raises(
        ReplayDecodeError, match="rollout_indexer_topk is required in rollout data when --use-rollout"
    ):
        fill_indexer_replay(actor, [], [1], {"tokens": []})


def test_rows_packed_otherwise_than_the_model_counts_keys_are_refused(parse):
    from vime.backends.megatron_utils.data import DataIterator, get_batch  # noqa: TID251

    from vime_replay.integrations.vime import IndexerReplay, Parallel, make_manager
    from vime_replay.layout import LayoutError

    args = parse("--data-pad-size-multiplier", "8")
    batches = IndexerReplay(args, make_manager(args), Parallel()).with_tickets(get_batch)
    samples = {"tokens": [list(range(9)), list(range(5))]}
    assert batches(DataIterator(samples, 2), ["tokens"], 8)["packed_seq_params"].replay_ticket.microbatch == 0
    with pytest.raises(LayoutError, match=r"expected \[0, 9, 14, 16\] .*, got \[0, 9, 14, 128\]"):
        batches(DataIterator(samples, 2), ["tokens"], 128)


def test_pack_rows_has_vimes_order_of_dimensions(parse, server):
    from vime_replay.errors import ReplayConfigError
    from vime_replay.integrations.vime import Parallel, pack_rows, spec_of
    from vime_replay.integrations.vime.trainer import batch_layout

    args = parse("--data-pad-size-multiplier", "4")
    lengths, tp = (9, 6), 2
    rows = [server.whole(n, n - 1) for n in lengths]
    layout = batch_layout(args, lengths, Parallel(tp_size=tp))
    tokens = [list(range(n)) for n in lengths]
    packed = pack_rows(rows, tokens, spec=spec_of(args), layout=layout)
    # All rows on every tensor-parallel rank; their number divides by it.
    assert packed.shape == (16, 3, 3)
    assert sorted(packed[7, 1].tolist()) == sorted(rows[0][7, 1].tolist())
    with pytest.raises(ReplayConfigError, match=r"expected tokens of lengths \(9, 6\)"):
        pack_rows(rows, tokens[::-1], spec=spec_of(args), layout=layout)


def test_vimes_names_on_a_layer(parse):
    from vime_replay.integrations.vime import IndexerReplay, Parallel, spec_of
    from vime_replay.manager import ReplayManager

    args, picks = parse(), torch.tensor([[0, 1, -1]], dtype=torch.int32)
    manager = ReplayManager(spec_of(args))
    manager.register(None, layer=3)
    replay = IndexerReplay(args, manager, Parallel())
    (layer,) = replay.all_routing_replays
    layer.record(picks)
    layer.record(picks + 1)
    cpu = torch.device("cpu")
    assert [layer.pop_forward(cpu)[0, 0] for _ in range(2)] == [0, 1]
    layer.clear_forward()
    assert layer.pop_forward(cpu).equal(picks)
    assert layer.pop_backward(cpu).equal(picks)
    layer.clear()
    assert manager.microbatches == []


def test_a_check_counts_disagreements_of_rows_that_choose(parse, server):
    """Fresh picks that share two of three with the replayed ones, in every sampled row of one layer."""
    from vime_replay.checking import PickCheck
    from vime_replay.integrations.vime import spec_of
    from vime_replay.layout import PackLayout
    from vime_replay.manager import ReplayManager

    spec = spec_of(parse())
    check = PickCheck.of(spec)
    manager = ReplayManager(spec, check=check, check_rows=10**6)
    queue = manager.register(None, layer=3)
    layout = PackLayout((40, 25), pad_multiple=70)
    manager.fill([manager.pack([server.whole(n, n - 1) for n in layout.lengths], layout)])
    whole = manager.microbatches[0].rows().picks_LSK[0]

    def compute(rows, width):
        picks = whole[rows].clone()
        picks[:, 0] = -1
        return picks

    with manager.stage("replay_forward"):
        manager.select(queue, compute, rows=70, ticket=None, device=torch.device("cpu"))
    with manager.stage("replay_backward"):
        manager.select(queue, compute, rows=70, ticket=None, device=torch.device("cpu"))
    values = check.flush().values()
    # Row r chooses when (r + 1) // 4 > 3; the last token of a sample has no row.
    choosing = sum((p + 1) // 4 > 3 for n in layout.lengths for p in range(n - 1))
    assert check.metrics.table.sum(axis=(0, 1, 2))[0] == choosing
    assert values["indexer_replay/overlap_mean"] == pytest.approx(2 / 3)
    assert values["indexer_replay/exact_rows"] == 0


def test_a_sample_that_counts_but_has_no_rows_is_named(parse):
    """A rollout server without its flag answers null: nothing would be replayed, and no layer would notice."""
    from vime.backends.megatron_utils.data import DataIterator  # noqa: TID251

    from vime_replay.errors import ReplayDecodeError
    from vime_replay.integrations.vime import IndexerReplay, Parallel, make_manager

    args = parse()
    replay = IndexerReplay(args, make_manager(args), Parallel())
    data = {"tokens": [[1, 2, 3]] * 2, "rollout_indexer_topk": [None, None], "loss_masks": [[0], [1]]}
    with pytest.raises(
        ReplayDecodeError, match="sample 1: rollout_indexer_topk is empty though the sample counts"
    ):
        replay.fill([DataIterator(data, 2)], [1], data)
    data["loss_masks"][1] = torch.zeros(1)
    assert replay.fill([DataIterator(data, 2)], [1], data).microbatches == 1


@pytest.mark.parametrize("ratio, offsets", [(1, [0, 0]), (4, [0, 2])], ids=["host-dsa", "dsv4"])
def test_keys_of_a_batch_are_counted_as_the_model_counts_them(parse, ratio, offsets):
    """Megatron's `dsa` scores [b, s, s], so its picks count keys of one sample."""
    import packing

    from vime_replay.integrations.vime import IndexerReplay, Parallel
    from vime_replay.manager import ReplayManager

    args = parse()
    args.qkv_format = "bshd"
    replay = IndexerReplay(args, ReplayManager(packing.spec_of(ratio=ratio)), Parallel())
    assert replay.layout([6, 5], 8).key_offsets(ratio).tolist() == offsets
    args.qkv_format = "thd"
    assert replay.layout([6, 5]).key_offsets(1).tolist() == [0, 6]
