# SPDX-License-Identifier: Apache-2.0
"""Which rule table belongs to a `model_type`.

The tables of this package need no model code, so reading, inspecting and rewriting checkpoints work without Megatron.
A model type that is not listed here comes from an installed plugin.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vime_convert import controls
from vime_convert.dsv4 import names as dsv4
from vime_convert.errors import ConfigError
from vime_convert.plugin import PluginError, load_plugin
from vime_convert.rules import RuleTable

TABLES: Mapping[str, Callable[[Mapping[str, Any]], RuleTable]] = {
    "deepseek_v4": dsv4.rule_table,
    "deepseek_v3": controls.deepseek_v3_table,
    "qwen3": controls.qwen3_table,
}


def table_for(cfg: Mapping[str, Any], plugin: str | None = None) -> RuleTable:
    """The rule table for a `config.json`.

    Args:
        cfg: the parsed file.
        plugin: "MODULE:ATTRIBUTE" of a plugin to use instead of what is known.

    Raises:
        ConfigError: no table knows the model type, or the table refuses the config.
    """
    model_type = cfg.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"config.json: expected a string model_type, got {model_type!r}")
    if plugin is None and model_type in TABLES:
        return TABLES[model_type](cfg)
    try:
        return load_plugin(model_type, plugin).rules(cfg)
    except PluginError as error:
        known = ", ".join(sorted(TABLES))
        raise ConfigError(f"config.json: model_type {model_type!r} is not one of {known}; {error}") from error
