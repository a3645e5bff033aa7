# SPDX-License-Identifier: Apache-2.0
"""`--dsv4-impl megatron`: what the message says without the variant, and what is set with it."""

import dataclasses
import sys
from argparse import Namespace
from importlib.metadata import version
from types import ModuleType

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig

from vime_models.dsv4 import get_dsv4_spec, native
from vime_models.dsv4.config import transformer_config
from vime_models.dsv4.tiny import TINY_CASES

VARIANT, HYPER, ENGINE = native._MODULES


def native_config():
    config = transformer_config(TINY_CASES[0].config, dtype=torch.float32)
    config.vime_dsv4 = dataclasses.replace(config.vime_dsv4, impl="megatron")
    return config


def test_the_released_host_lists_what_is_missing():
    with pytest.raises(RuntimeError) as error:
        get_dsv4_spec(Namespace(), native_config())
    message = str(error.value)
    assert f"--dsv4-impl megatron is not usable with megatron-core {version('megatron-core')}" in message
    for reason in (
        f"cannot import {VARIANT}",
        f"cannot import {HYPER}",
        f"cannot import {ENGINE}",
        "needs an MLA config",
    ):
        assert reason in message
    assert message.endswith("use --dsv4-impl vime")


def test_tensor_parallelism_is_a_reason(monkeypatch):
    for name in native._MODULES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    config = native_config()
    config.tensor_model_parallel_size = 2
    assert native.missing(config)[0] == "it runs without tensor parallelism only (here 2)"


def test_a_host_with_the_variant_is_configured_and_asked(monkeypatch):
    for name in native._MODULES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    config = native_config()
    config.__class__ = MLATransformerConfig  # only its type is asked for
    asked = []
    host = ModuleType(native._SPECS)
    host.get_transformer_block_with_experimental_attention_variant_spec = lambda *arguments: (
        asked.append(arguments) or "the host's spec"
    )
    monkeypatch.setitem(sys.modules, native._SPECS, host)
    assert get_dsv4_spec(Namespace(), config, None) == "the host's spec"
    assert asked == [(config, None)]
    assert config.experimental_attention_variant == "dsv4_hybrid"
    assert config.csa_compress_ratios == [0, 0, 4, 128, 4]
    assert config.csa_compress_rotary_base == 160000.0
    assert (config.num_residual_streams, config.moe_n_hash_layers, config.actual_vocab_size) == (4, 2, 160)
