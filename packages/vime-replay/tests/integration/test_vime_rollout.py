# SPDX-License-Identifier: Apache-2.0
"""vime's rollout side: requests, responses, continuation, spilling, flags, and which names of the host are needed."""

import asyncio
import sys

import packing
import pytest
from rollouts import generate, sample_of, spill


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
    "null without an abort": (
        lambda choice: choice.update(indexer_topk=None, finish_reason="stop"),
        "got null after finish_reason 'stop'; start the server with --enable-return-indexer-topk",
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
    with pytest.raises(ReplayConfigError, match=r"--indexer-replay-missing recompute: expected .* got empty"):
        parse("--indexer-replay-missing", "recompute", "--indexer-replay-pad-policy", "empty")
    with pytest.raises(ReplayConfigError, match="--indexer-replay-check-rows: expected at least 1, got 0"):
        parse("--indexer-replay-check-rows", "0")
    args.use_rollout_indexer_replay, args.use_rollout_logprobs = False, True
    with pytest.raises(ReplayConfigError, match="got --use-rollout-logprobs, which skips it"):
        validate_arguments(args)


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


def test_a_sample_without_a_mask_counts_whole_and_is_not_spilled_with_rows_missing(parse, server):
    from vime_replay.errors import ReplayDecodeError

    args, sample = parse(), sample_of(1, 9)
    generate(args, sample)
    sample.append_response_tokens(args, tokens=[50, 51])
    sample.loss_mask = None
    with pytest.raises(ReplayDecodeError, match="tokens without rows count in the loss"):
        spill(args, sample)
    sample.rollout_indexer_topk = None
    assert spill(args, sample).rollout_indexer_topk is None
