# SPDX-License-Identifier: Apache-2.0
"""Replay through Megatron's own sparse attention: picks of single sequences in a packed batch, whatever the weights."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa, dsa_kernels
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from vime_models.host.dsa_replay import attach_dsa_replay
from vime_models.host.linear import ReplicatedLinear
from vime_replay.layout import PackLayout
from vime_replay.manager import ReplayManager
from vime_replay.schedule import ReplayTicket
from vime_replay.spec import ReplaySpec

LENGTHS, TOPK, HEADS, WIDTH, HIDDEN, LORA = (9, 30, 1, 17), 5, 2, 8, 12, 6
SPEC = ReplaySpec("indexer", "rollout_indexer_topk", 2, TOPK, {0: 0, 1: 1})
LAYOUT = PackLayout(LENGTHS)
TICKET = ReplayTicket(0, 0)

pytestmark = pytest.mark.usefixtures("world")


def config(**options: Any) -> MLATransformerConfig:
    return MLATransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        q_lora_rank=LORA,
        qk_pos_emb_head_dim=4,
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=3,
        dsa_indexer_head_dim=8,
        dsa_indexer_topk=TOPK,
        dsa_indexer_rotate_activation=False,
        rope_type="rope",
        use_cpu_initialization=True,
        transformer_impl="local",
        add_bias_linear=False,
        **options,
    )


class KeyNorm(torch.nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


class Model(torch.nn.Module):
    """Two attentions in a decoder; how their inputs came about does not matter here."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        indexer = ModuleSpec(
            dsa.DSAIndexer,
            submodules=dsa.DSAIndexerSubmodules(
                linear_wq_b=ReplicatedLinear,
                linear_wk=ReplicatedLinear,
                k_norm=KeyNorm,
                linear_weights_proj=ReplicatedLinear,
            ),
        )
        shape, groups = config(**options), ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.decoder = torch.nn.ModuleList(
            dsa.DSAttention(
                shape,
                dsa.DSAttentionSubmodules(indexer=indexer),
                number,
                AttnMaskType.causal,
                "self",
                k_channels=WIDTH,
                pg_collection=groups,
            )
            for number in (1, 2)
        )
        # Wide weights: picks of two models then differ in most rows.
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)

    def forward(self, inputs: dict[str, torch.Tensor], lengths: tuple[int, ...], ticket: Any = None) -> Any:
        cu_seqlens = torch.from_numpy(PackLayout(lengths).cu_seqlens)
        packed = PackedSeqParams(
            "thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        packed.replay_ticket = ticket
        outputs = [
            layer(**inputs, attention_mask=None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
            for layer in self.decoder
        ]
        return torch.cat(outputs, -1).flatten(0, 1)


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    heads, rows = (total, 1, HEADS, WIDTH), (total, 1)
    return {
        name: torch.randn(*shape, generator=generator)
        for name, shape in {
            "query": heads,
            "key": heads,
            "value": heads,
            "x": (*rows, HIDDEN),
            "qr": (*rows, LORA),
        }.items()
    }


@pytest.fixture
def undo() -> Iterator[list[Any]]:
    """Host functions are given back after a test."""
    calls: list[Any] = []
    yield calls
    for call in calls:
        call()


def parts(inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    split = {name: each.split(LENGTHS) for name, each in inputs.items()}
    return [{name: each[i] for name, each in split.items()} for i in range(len(LENGTHS))]


def recording(inputs: Any, undo: list[Any], **options: Any) -> tuple[list[np.ndarray], torch.Tensor]:
    """Rows of each sequence, and outputs, of a model with other weights."""
    model, manager = Model(1, **options), ReplayManager(SPEC)
    undo.append(attach_dsa_replay(model, manager))
    with manager.stage("record"), torch.no_grad():
        outputs = [model(part, (n,)) for part, n in zip(parts(inputs), LENGTHS, strict=True)]
    rows = []
    for batch in manager.microbatches:
        picks = batch.rows().picks_LSK[:, :-1].numpy().transpose(1, 0, 2)
        rows.append(np.pad(picks, ((0, 0), (0, 0), (0, TOPK - picks.shape[2])), constant_values=-1))
    undo.pop()()
    return rows, torch.cat(outputs)


@pytest.mark.parametrize("loss", [None, 0.1], ids=["frozen", "with-loss"])
def test_a_packed_batch_attends_to_the_recorded_picks(
    inputs: Any, undo: list[Any], loss: float | None
) -> None:
    options = {"dsa_indexer_loss_coeff": loss, "dsa_indexer_use_sparse_loss": True}
    rows, expected = recording(inputs, undo, **options)
    model, manager = Model(2, **options), ReplayManager(SPEC)
    recorded = torch.cat([torch.arange(n) < n - 1 for n in LENGTHS])
    with torch.no_grad():
        natively = model(inputs, LENGTHS)
    assert (natively - expected)[recorded].abs().max() > 0.1
    undo.append(attach_dsa_replay(model, manager))
    manager.fill([manager.pack(rows, LAYOUT, ticket=TICKET)])
    with manager.stage("replay_forward"):
        output = model(inputs, LENGTHS, TICKET)
    torch.testing.assert_close(output[recorded], expected[recorded], rtol=1e-5, atol=1e-6)
    # The last token of a sequence has no row and picks by its own scores.
    torch.testing.assert_close(output[~recorded], natively[~recorded], rtol=1e-5, atol=1e-6)
    manager.assert_consumed(backward="none")


def test_rows_of_a_batch_go_batch_by_batch(inputs: Any, undo: list[Any]) -> None:
    """[s, b] input without packing: queue rows are those of the first sequence, then of the second."""
    model, manager = Model(1), ReplayManager(SPEC)
    undo.append(attach_dsa_replay(model, manager))
    batch = {name: torch.stack([each[:20, 0], each[20:40, 0]], 1) for name, each in inputs.items()}

    def run() -> torch.Tensor:
        options = {"attention_mask": None, "attn_mask_type": AttnMaskType.causal}
        return torch.cat([layer(**batch, **options) for layer in model.decoder], -1)

    with torch.no_grad(), manager.stage("record"):
        expected = run()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    assert manager.microbatches[0].shape == (2, 40, TOPK)
    with torch.no_grad():
        assert not torch.allclose(run(), expected)
        with manager.stage("replay_forward"):
            torch.testing.assert_close(run(), expected)


def test_layers_that_share_picks_follow_their_source(inputs: Any, undo: list[Any]) -> None:
    shared = {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1}
    model, manager = Model(1, **shared), ReplayManager(SPEC)
    undo.append(attach_dsa_replay(model, manager))
    assert [(queue.layer, queue.stream) for queue in manager.queues] == [(0, 0)]
    with torch.no_grad(), manager.stage("record"):
        expected = model(inputs, LENGTHS)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad(), manager.stage("replay_forward"):
        torch.testing.assert_close(model(inputs, LENGTHS), expected)


def test_a_stage_that_begins_with_a_sharing_layer_is_refused() -> None:
    model = Model(1, dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=1)
    del model.decoder[0]
    with pytest.raises(ValueError, match=r"got layers \[2\], the first of which reuses the picks of layer 1"):
        attach_dsa_replay(model, ReplayManager(SPEC))


class Fused(torch.nn.Module):
    """What the host calls with a fused backend."""

    def forward(self) -> Any:
        return dsa_kernels.run_fused_qk_topk(), dsa_kernels.run_fused_dsa_attention()


def test_a_fused_selection_is_replaced_and_a_fused_attention_declines(
    undo: list[Any], monkeypatch: Any
) -> None:
    backend = {"picks": [[[4, 2, -1], [1, 0, 3]]], "length": [[2, 3]]}
    native = [torch.tensor(each, dtype=torch.int32) for each in backend.values()]
    monkeypatch.setattr(dsa_kernels, "run_fused_qk_topk", lambda: tuple(native))
    monkeypatch.setattr(dsa_kernels, "run_fused_dsa_attention", lambda: "output")
    model, layer, manager = torch.nn.Module(), Fused(), ReplayManager(SPEC)
    model.decoder = torch.nn.Module()
    undo.append(attach_dsa_replay(model, manager))
    manager.register(layer, layer=0)
    assert layer()[1] == "output"
    found = []
    for stage in ("record", "replay_forward"):
        with manager.stage(stage):
            (picks, length), output = layer()
        assert output is None
        found.append({"picks": picks.tolist(), "length": length.tolist()})
        native = [each * 0 for each in native]
    assert found == [backend, backend]
