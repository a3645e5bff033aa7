# SPDX-License-Identifier: Apache-2.0
"""Five trajectories through a stand-in for vime, the server that answers them, and what each layer must be given."""

import asyncio

import numpy as np
import packing
import torch

OWNERS = (1, 3, 4)
HF = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 6,
    "compress_ratios": [0, 4, 128, 4, 4, 0, 0],
    "index_topk": 3,
}


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
