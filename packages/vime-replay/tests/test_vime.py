# SPDX-License-Identifier: Apache-2.0
"""The connection to vime against a stand-in: from the server's text to the layers, and the host's names."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import packing
import pytest
import torch

FAKE = Path(__file__).parent / "fake_vime"
HF = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 6,
    "compress_ratios": [0, 4, 128, 4, 4, 0, 0],
    "index_topk": 3,
}
OWNERS = (1, 3, 4)


@pytest.fixture
def vime(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKE))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vime"]:
        del sys.modules[name]


@pytest.fixture
def parse(vime, tmp_path):
    from vime.utils.arguments import get_vime_extra_args_provider  # noqa: TID251

    from vime_replay.integrations.vime import validate_arguments

    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(HF))

    def make(*words):
        parser = get_vime_extra_args_provider()(argparse.ArgumentParser())
        defaults = [
            "--use-rollout-indexer-replay",
            "--rollout-indexer-topk-store-dir",
            str(tmp_path / "store"),
        ]
        args = parser.parse_args(["--hf-checkpoint", str(tmp_path / "hf"), *defaults, *words])
        validate_arguments(args)
        return args

    return make


class Server:
    """Answers with rows of a policy that is fixed by the position, as an engine with a prefix cache would."""

    def __init__(self, spec, monkeypatch):
        from vime.rollout import vllm_rollout  # noqa: TID251

        self.spec, self.requests, self.abort = spec, [], False
        self.rng = np.random.default_rng(0)
        self.rows = {}
        monkeypatch.setattr(vllm_rollout, "SERVER", self)

    def whole(self, first, count):
        """Rows of a sample that begins with token `first`; longer ones repeat shorter ones."""
        known = self.rows.setdefault(first, packing.random_rows(self.rng, 400, self.spec, full=True))
        return known[:count]

    def __call__(self, request):
        from vime_vllm_patch import wire

        self.requests.append(request)
        if self.abort:
            return {"token_ids": [], "finish_reason": "abort", "indexer_topk": None}
        start = request["sampling_params"]["indexer_topk_prompt_start"]
        tokens = [*request["prompt"], 7, 8, 9]
        rows = self.whole(tokens[0], len(tokens) - 1)[start:]
        return {
            "token_ids": tokens[-3:],
            "finish_reason": "stop",
            "indexer_topk": wire.encode(np.ascontiguousarray(rows)),
            "indexer_topk_layer_ids": list(OWNERS),
        }


@pytest.fixture
def server(parse, monkeypatch):
    from vime_replay.integrations.vime import spec_of

    return Server(spec_of(parse()), monkeypatch)


def generate(args, sample):
    from vime.rollout.vllm_rollout import generate  # noqa: TID251

    return asyncio.run(generate(args, sample, {}))


def spill(args, sample, **keywords):
    from vime_replay.integrations.vime import spill_indexer_topk

    return asyncio.run(spill_indexer_topk(args, sample, rollout_id=3, **keywords))


def sample_of(index, prompt):
    from vime.utils.types import Sample  # noqa: TID251

    return Sample(index=index, tokens=[100 + index, *range(1, prompt)])


def rollout(args, server, spilled):
    """Five trajectories: one turn, two turns with a tool between, an abort and resume, a tool at the end, no loss."""
    from vime.utils.types import Sample  # noqa: TID251

    samples = [sample_of(index, prompt) for index, prompt in enumerate((5, 9, 2, 30, 4))]
    generate(args, samples[0])
    generate(args, samples[1])
    samples[1].append_response_tokens(args, tokens=[50, 51, 52, 53], trainable=False)
    generate(args, samples[1])
    server.abort = True
    generate(args, samples[2])
    server.abort = False
    assert samples[2].status is Sample.Status.ABORTED
    assert spill(args, samples[2]).rollout_indexer_topk is None
    generate(args, samples[2])
    generate(args, samples[3])
    samples[3].append_response_tokens(args, tokens=[60, 61], trainable=False)
    samples[4].append_response_tokens(args, tokens=[70, 71], trainable=False)
    samples[4].status = Sample.Status.COMPLETED
    for sample in samples:
        if spilled == "all" or (spilled == "some" and sample.index % 2) or sample.index > 2:
            spill(args, sample)
    return samples


class Chunk:
    """A model chunk whose layers note what they were given."""

    def __init__(self, manager, number, layers):
        self.manager, self.number, self.seen = manager, number, []
        self.queues = [manager.register(None, layer=layer, chunk=number) for layer in layers]

    def __call__(self, batch):
        packed, stage = batch["packed_seq_params"], self.manager.current_stage
        rows = packed.layout.local_rows if hasattr(packed, "layout") else 1
        for queue in self.queues:

            def compute(wanted, width, rows=rows):
                return torch.full(
                    (rows if wanted is None else len(wanted), width or 3), -9, dtype=torch.int32
                )

            picks = self.manager.select(
                queue,
                compute,
                rows=rows,
                ticket=getattr(packed, "replay_ticket", None),
                device=torch.device("cpu"),
            )
            self.seen.append((str(stage), queue.layer, batch["tokens"], picks.clone()))


def expected_picks(server, samples, tokens, layer, *, mode, cp, rank, multiple):
    """Rows of one layer by a plain loop, -9 where the layer had to select."""
    stream, chosen = OWNERS.index(layer), [next(s for s in samples if s.tokens == each) for each in tokens]
    lengths = [len(each) for each in tokens]
    rows = []
    for sample in chosen:
        whole = server.whole(sample.tokens[0], len(sample.tokens) - 1).copy()
        # Nobody ran these: tool tokens at the end, or the whole sample.
        whole[{3: 32, 4: 0}.get(sample.index, len(whole)) :] = -1
        rows.append(whole)
    ranks, extents = packing.stream_of(lengths, mode=mode, cp=cp, pad_multiple=multiple)
    picks = packing.packed(ranks[rank], rows, lengths, extents, ratio=4, key_space="padded")[stream]
    for local, owner in enumerate(ranks[rank]):
        unrecorded = owner is None or owner[1] >= lengths[owner[0]] - 1
        if (picks[local] < 0).all() and (unrecorded or (owner[1] + 1) // 4):
            picks[local] = -9
    return [sorted(row) for row in picks.tolist()]


LAYOUTS = {
    "one-rank": ((), 1, 0, "zigzag"),
    "zigzag": ((), 2, 1, "zigzag"),
    "contiguous": (("--allgather-cp",), 2, 1, "contiguous"),
}


@pytest.mark.parametrize("recompute", [(), ("--recompute-granularity", "full")], ids=["plain", "recompute"])
@pytest.mark.parametrize("spilled", ["none", "some", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layer_is_given_the_servers_picks(parse, server, layout, spilled, recompute):
    from vime.backends.megatron_utils.actor import MegatronTrainRayActor  # noqa: TID251
    from vime.ray.rollout import RolloutManager  # noqa: TID251

    from vime_replay.integrations.vime import IndexerReplay, Parallel, make_manager

    words, cp, rank, mode = LAYOUTS[layout]
    args = parse("--data-pad-size-multiplier", "8", *words, *recompute)
    samples = rollout(args, server, spilled)
    ray = RolloutManager()
    (data,) = ray._split_train_data_by_dp(ray._convert_samples_to_train_data(samples), [[2, 0, 4, 1, 3]])
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


def test_a_continuation_asks_only_for_what_is_missing(parse, server):
    args = parse()
    sample = sample_of(1, 9)
    generate(args, sample)
    sample.append_response_tokens(args, tokens=[50, 51], trainable=False)
    generate(args, sample)
    assert [r["sampling_params"]["indexer_topk_prompt_start"] for r in server.requests] == [0, 11]
    assert sample.rollout_indexer_topk.shape == (16, 3, 3)


def test_evaluation_drops_rows_and_a_spilled_sample_is_linked_into_the_next_rollout(parse, server):
    args = parse()
    assert spill(args, generate(args, sample_of(0, 5)), evaluation=True).rollout_indexer_topk is None
    sample = generate(args, sample_of(1, 5))
    first = spill(args, sample).rollout_indexer_topk
    assert spill(args, sample).rollout_indexer_topk is first
    from vime_replay.integrations.vime import spill_indexer_topk

    asyncio.run(spill_indexer_topk(args, sample, rollout_id=4))
    assert "rollout_00000004" in sample.rollout_indexer_topk.path
    assert sample.rollout_indexer_topk[2:4].equal(first[2:4])
    # The next turn reads rows back from the file.
    generate(args, sample)
    assert sample.rollout_indexer_topk.shape == (10, 3, 3)


def test_rows_of_meta_info(vime):
    from vime_replay.integrations.vime import rows_of_meta_info

    assert rows_of_meta_info({"indexer_topk": "x", "indexer_topk_start_len": 5, "other": 1}) == (
        {"indexer_topk": "x"},
        5,
    )


def test_a_dropped_sample_has_no_loss_and_its_rows_are_computed(parse, server, monkeypatch):
    args = parse("--indexer-replay-missing", "drop-sample")
    hole = packing.random_rows(server.rng, 400, server.spec, full=True)
    hole[6] = -1
    server.rows[100] = hole
    sample = generate(args, sample_of(0, 9))
    assert sample.remove_sample
    assert (sample.rollout_indexer_topk == -1).all()
    assert sample.rollout_indexer_topk.shape == (11, 3, 3)


ERRORS = {
    "no field": (
        lambda choice: choice.pop("indexer_topk"),
        "expected the field indexer_topk in the response",
    ),
    "other layers": (
        lambda choice: choice.update(indexer_topk_layer_ids=[1, 3, 5]),
        r"expected layers \[1, 3, 4\] in 3 streams, the server sent layers \[1, 3, 5\]",
    ),
    "broken text": (lambda choice: choice.update(indexer_topk="?"), r"wire\.(base64|size)|npy"),
}


@pytest.mark.parametrize("change, message", ERRORS.values(), ids=ERRORS)
def test_a_wrong_response_is_refused(parse, server, change, message):
    from vime_replay.errors import ReplayError
    from vime_replay.integrations.vime import apply_choice

    args, sample = parse(), sample_of(0, 5)
    choice = server({"prompt": sample.tokens, "sampling_params": {"indexer_topk_prompt_start": 0}})
    sample.append_response_tokens(args, tokens=choice["token_ids"])
    change(choice)
    with pytest.raises(ReplayError, match=message):
        apply_choice(args, sample, choice, start=0)
    assert sample.rollout_indexer_topk is None


def test_without_the_flag_nothing_happens(parse):
    from vime_replay.integrations.vime import apply_choice, request_parameters

    args = parse()
    args.use_rollout_indexer_replay = False
    assert request_parameters(args, sample_of(0, 5)) == {}
    apply_choice(args, sample_of(0, 5), {}, start=0)


def test_flags_that_do_not_go_together(parse):
    from vime_replay.errors import ReplayConfigError
    from vime_replay.integrations.vime import validate_arguments

    args = parse()
    assert args.use_indexer_replay
    assert args.vllm_enable_return_indexer_topk
    with pytest.raises(
        ReplayConfigError, match="--rollout-indexer-topk-num-streams: expected 3 for this model, got 6"
    ):
        parse("--rollout-indexer-topk-num-streams", "6")
    with pytest.raises(ReplayConfigError, match=r"--indexer-replay-check-interval: expected .* got empty"):
        parse("--indexer-replay-check-interval", "2", "--indexer-replay-pad-policy", "empty")
    args.use_rollout_indexer_replay, args.use_rollout_logprobs = False, True
    with pytest.raises(ReplayConfigError, match="got --use-rollout-logprobs, which skips it"):
        validate_arguments(args)


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


def test_the_probe_finds_every_name_and_says_what_is_missing(vime, monkeypatch, capsys):
    from vime_replay.integrations.vime import probe
    from vime_replay.integrations.vime.__main__ import main

    assert [each for each in probe.check() if each.state != "found"] == []
    assert main(["--check"]) == 0
    assert "found    vime.data.tensor.DiskTensorRef.write  (spill_indexer_topk)" in capsys.readouterr().out
    needs = (
        probe.Need("vime.utils.types", "Sample.renamed", (), "x"),
        probe.Need("vime.gone", "f", (), "x"),
        probe.Need("vime.data.tensor", "DiskTensorRef.link", ("target",), "x"),
    )
    monkeypatch.setattr(probe, "NEEDS", needs)
    assert main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "missing  vime.utils.types.Sample.renamed  (x): no renamed in types.py" in printed
    assert "missing  vime.gone.f  (x): no such module" in printed
    assert (
        "differs  vime.data.tensor.DiskTensorRef.link  (x): expected parameters target, got self, output_path"
        in printed
    )


def test_the_rollouts_half_needs_no_torch(vime):
    import subprocess

    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from vime_replay.integrations.vime import apply_choice, spill_indexer_topk, append_rows, add_arguments, check"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
