# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def world() -> Iterator[None]:
    from vime_models.host import bringup

    bringup.init_world()
    yield
    bringup.destroy_world()


@pytest.fixture
def make_config(world: None) -> Callable[..., Any]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from vime_models.host.cpu import cpu_overrides

    def make(**fields: Any) -> Any:
        defaults = {
            "num_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "params_dtype": torch.float64,
        }
        return TransformerConfig(**cpu_overrides(defaults | fields))

    return make
