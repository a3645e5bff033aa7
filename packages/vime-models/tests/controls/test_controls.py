# SPDX-License-Identifier: Apache-2.0
"""Stock Megatron with our host modules computes what transformers computes, from the same files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vime_convert.megatron.loader import load_checkpoint
from vime_convert.plugin import ModelPlugin, load_plugin
from vime_convert.reader import CheckpointReader
from vime_convert.tiny import make_tiny
from vime_convert.verify.case import run_case
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_models.controls import common, deepseek_v3
from vime_models.host import bringup

MODELS = ["qwen3", "deepseek_v3"]


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    yield
    bringup.destroy_world()


@pytest.fixture(scope="module", params=MODELS)
def plugin(request: pytest.FixtureRequest) -> ModelPlugin:
    return load_plugin(request.param)


@pytest.fixture(scope="module")
def checkpoint(plugin: ModelPlugin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(plugin.model_type) / "tiny"
    make_tiny(plugin.tiny_cases[0].config, directory, seed=5, plugin=plugin)
    return directory


def _both(plugin: ModelPlugin, directory: Path, precision: str, edit: Any = None) -> tuple[Any, ...]:
    """(logits, states) of Megatron, then of transformers."""
    case, chosen = plugin.tiny_cases[0], PRECISIONS[precision]
    ids = torch.randint(case.config["vocab_size"], (1, case.seq_len), generator=torch.manual_seed(3))
    ours: dict[int, torch.Tensor] = {}
    theirs: list[torch.Tensor] = []
    plugin.setup("cpu")
    with running_in(chosen), torch.no_grad():
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=chosen.dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        for layer in reference.model.layers:
            layer.register_forward_hook(
                lambda _m, _i, out: theirs.append(out[0] if isinstance(out, tuple) else out)
            )
        expected = reference(ids, use_cache=False).logits
        chunks = plugin.build(case.config, dtype=chosen.dtype, device="cpu")
    # Outside, because the mode would also change the dtype in which float32 bytes are read.
    load_checkpoint(chunks, CheckpointReader(directory), plugin.rules(case.config))
    with running_in(chosen), torch.no_grad():
        if edit is not None:
            edit(dict(chunks[0].named_parameters()))
        handles = plugin.layer_states(chunks, ours.__setitem__)
        logits = plugin.forward(chunks, ids)
    for handle in handles:
        handle.remove()
    return logits, [ours[index] for index in range(len(ours))], expected, theirs


@pytest.mark.parametrize(
    # Logits reach 8, where one float32 step is 5e-7.
    "precision, limit",
    [("float64", 1e-12), ("float32", 5e-6)],
    ids=["float64", "float32"],
)
def test_equals_transformers(plugin: ModelPlugin, checkpoint: Path, precision: str, limit: float) -> None:
    logits, states, expected, their_states = _both(plugin, checkpoint, precision)
    assert expected.std() > 1, "the premise: logits large enough to compare"
    assert logits.shape == expected.shape
    assert logits.dtype is expected.dtype is PRECISIONS[precision].dtype
    assert (logits - expected).abs().max() < limit
    assert len(states) == len(their_states) == plugin.tiny_cases[0].config["num_hidden_layers"]
    for ours, theirs in zip(states, their_states, strict=True):
        assert ours.shape == theirs.shape
        assert ((ours - theirs).norm() / theirs.norm()) < limit


def test_the_verifier_finds_gradients_and_round_trips_equal_too(
    plugin: ModelPlugin, checkpoint: Path
) -> None:
    case = plugin.tiny_cases[0]
    result = run_case(plugin, checkpoint, name=case.name, seq_len=case.seq_len, precisions=("float64",))
    assert {check.name.split("[")[0] for check in result.checks} >= {"gradients", "round-trip"}
    assert result.ok, [check for check in result.checks if not check.ok]


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.1.self_attention.linear_proj.weight",
        "decoder.layers.2.input_layernorm.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
    ],
)
def test_every_part_matters(plugin: ModelPlugin, checkpoint: Path, name: str) -> None:
    def zero(parameters: dict[str, torch.Tensor]) -> None:
        parameters[name].zero_()

    logits, _, expected, _ = _both(plugin, checkpoint, "float32", zero)
    assert (logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"attention_bias": True}, "expected attention_bias=False, got True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "plain rotary embeddings"),
        ({"topk_group": 1}, r"num_experts_per_tok == 2 \* topk_group, got 4 and 1"),
    ],
    ids=["bias", "yarn", "groups"],
)
def test_unmapped_features_are_refused(change: dict[str, Any], message: str) -> None:
    config = dict(deepseek_v3.TINY_CASE.config) | change
    with pytest.raises(common.ControlConfigError, match=message):
        deepseek_v3.PLUGIN.build(config, dtype=torch.float32, device="cpu")
