# SPDX-License-Identifier: Apache-2.0
"""The audit on DeepSeek-V4, and on mistakes made on purpose."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vime_convert.megatron.loader import load_checkpoint
from vime_convert.reader import CheckpointReader
from vime_convert.tiny import make_tiny
from vime_models import audit
from vime_models.dsv4.plugin import PLUGIN
from vime_models.dsv4.tiny import TINY_CASES

CONFIG = TINY_CASES[0].config


@pytest.fixture
def model(tmp_path: Path) -> Any:
    PLUGIN.setup("cpu")
    make_tiny(CONFIG, tmp_path, seed=0, plugin=PLUGIN)
    (model,) = PLUGIN.build(CONFIG, dtype=torch.float32, device="cpu")
    load_checkpoint([model], CheckpointReader(tmp_path), PLUGIN.rules(CONFIG))
    return model


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-3, weight_decay=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer) -> list[audit.Row]:
    before = audit.snapshot(model)
    ids = torch.randint(CONFIG["vocab_size"], (1, 160), generator=torch.Generator().manual_seed(0))
    PLUGIN.forward([model], ids).logsumexp(-1).mean().backward()
    optimizer.step()
    return audit.report(model, optimizer, before)


def test_frozen_parts_stay_and_the_rest_moves(model):
    rows = step(model, adamw(p for p in model.parameters() if p.requires_grad))
    assert audit.problems(rows) == []
    kinds = {row.name: row.kind for row in rows}
    frozen = {name for name, kind in kinds.items() if kind == "frozen"}
    assert frozen == {name for name in kinds if ".indexer." in name}
    assert {row.name.rsplit(".", 1)[1] for row in rows if row.kind == "buffer"} == {"expert_bias", "tid2eid"}
    assert all(row.update == 0 for row in rows if row.kind != "trained")
    # An expert without a token has a zero gradient and still decays.
    assert all(row.update > 0 for row in rows if row.kind == "trained")
    assert {row.weight_decay for row in rows if row.kind == "trained"} == {0.1}


def test_weight_decay_on_a_frozen_part_is_found(model):
    """What the freeze protects from: a zero gradient is enough for AdamW to shrink a weight."""
    optimizer = adamw(model.parameters())
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            parameter.grad = torch.zeros_like(parameter)
    problems = audit.problems(step(model, optimizer))
    touched = {line.split(":")[0] for line in problems if "frozen, but it changed by" in line}
    assert touched
    assert all(".indexer." in name for name in touched)
    assert sum("frozen, but the optimizer has it" in line for line in problems) >= len(touched)


def test_a_parameter_that_nobody_trains_is_found(model):
    left_out = "output_layer.weight"
    problems = audit.problems(
        step(model, adamw(p for n, p in model.named_parameters() if p.requires_grad and n != left_out))
    )
    assert problems == [f"{left_out}: trained, but the optimizer does not have it"]


def test_a_buffer_that_moves_is_found(model):
    before = audit.snapshot(model)
    model.decoder.layers[2].mlp.router.expert_bias += 1e-3
    problems = audit.problems(audit.report(model, adamw(model.parameters()), before))
    assert "decoder.layers.2.mlp.router.expert_bias: buffer, but it changed by 1.0e-03" in problems


def test_table_folds_layers_and_experts(model):
    text = audit.table(audit.report(model, adamw(p for p in model.parameters() if p.requires_grad)))
    lines = text.splitlines()
    assert len(lines) < 60
    (line,) = [
        line for line in lines if line.endswith("decoder.layers.*.self_attention.indexer.linear_wq_b.weight")
    ]
    assert line.split()[:5] == ["2", "frozen", "-", "-", "?"]


def test_copies_of_megatrons_optimizers_are_followed_back():
    """The three ways in which Megatron's optimizers keep float32 copies of a parameter."""
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    copies = [torch.ones(2), torch.ones(1)]

    float16 = SimpleNamespace(
        param_groups=[{"params": [copies[0]], "weight_decay": 0.1}],
        float16_groups=[[parameters[0]]],
        fp32_from_float16_groups=[[copies[0]]],
    )
    distributed = SimpleNamespace(
        param_groups=[{"params": [copies[1]], "weight_decay": 0.2}],
        model_param_group_index_map={parameters[1]: (0, 0)},
    )
    chained = SimpleNamespace(chained_optimizers=[float16, distributed])
    rows = audit.report(torch.nn.ParameterList(parameters), chained)
    assert [row.weight_decay for row in rows] == [0.1, 0.2]
