# SPDX-License-Identifier: Apache-2.0
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import get_submodules

from vime_models.host.specs import args_and_config, replace_submodules, stage_layer_ids


class _Norm: ...


@pytest.mark.parametrize("num_experts", [None, 4], ids=["dense", "moe"])
def test_replace_submodules_copies_both_spec_forms(num_experts: int | None) -> None:
    layer = get_gpt_layer_local_spec(num_experts=num_experts)
    old = get_submodules(layer.submodules.mlp)
    field = "linear_fc1" if num_experts is None else "experts"
    mlp = replace_submodules(layer.submodules.mlp, **{field: _Norm})
    new = replace_submodules(layer, mlp=mlp, input_layernorm=_Norm)
    assert getattr(get_submodules(new.submodules.mlp), field) is _Norm
    assert new.submodules.input_layernorm is _Norm
    assert new.submodules.self_attention is layer.submodules.self_attention
    assert get_submodules(layer.submodules.mlp) is old, "the argument is not changed"
    assert getattr(old, field) is not _Norm
    assert layer.submodules.input_layernorm is not _Norm


def test_replace_submodules_names_what_exists() -> None:
    with pytest.raises(ValueError, match=r"no field input_norm; it has .*input_layernorm"):
        replace_submodules(get_gpt_layer_local_spec(), input_norm=_Norm)
    with pytest.raises(ValueError, match="dataclass of submodules"):
        replace_submodules(SimpleNamespace(submodules=None), x=1)


def test_stage_layer_ids(make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage_layer_ids(make_config(num_layers=3)) == [0, 1, 2]
    from megatron.core import parallel_state

    config = make_config(num_layers=5, pipeline_model_parallel_size=2, num_layers_in_last_pipeline_stage=2)
    for rank, expected in ((0, [0, 1, 2]), (1, [3, 4])):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        assert stage_layer_ids(config) == expected


# Importing megatron.training imports fla where it is installed, which warns without a GPU and flash-attn.
@pytest.mark.filterwarnings("ignore::UserWarning:fla.*", "ignore::ImportWarning:fla.*")
def test_args_and_config_accepts_both_callers(make_config: Callable[..., Any]) -> None:
    config, args = make_config(), Namespace(a=1)
    assert args_and_config(args, config) == (args, config)
    assert args_and_config(SimpleNamespace(transformer=config), None)[1] is config
    with pytest.raises(TypeError, match="got Namespace without a config"):
        args_and_config(args, None)
