# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 for Megatron: `--spec vime_models.dsv4 get_dsv4_spec`.

Importable without Megatron; Megatron's resolver reads plain module attributes and turns an ImportError into None.
"""

from typing import Any

from vime_models.dsv4.arguments import add_arguments
from vime_models.dsv4.config import DSv4Options

__all__ = ["DSv4Options", "add_arguments", "get_dsv4_spec"]


def get_dsv4_spec(args: Any, config: Any = None, vp_stage: int | None = None) -> Any:
    """The decoder layers of this pipeline stage, as `TransformerBlockSubmodules`.

    Args:
        args: parsed Megatron arguments; or, as megatron.training calls it, the GPTModelConfig, whose
            `transformer` is the config while the arguments are Megatron's global ones.
        config: the TransformerConfig. Options that are attached already (`config.vime_dsv4`) are kept.
        vp_stage: virtual pipeline stage.

    Raises:
        DSv4OptionError: a flag is missing or wrong.
        RuntimeError: `--dsv4-impl megatron` without a host that has it.
        ModuleNotFoundError: megatron-core is not installed; the message names the extra.
    """
    from vime_models._compat import check_megatron

    check_megatron()
    from vime_models.dsv4.spec import block_spec
    from vime_models.host.specs import args_and_config

    args, config = args_and_config(args, config)
    return block_spec(args, config, vp_stage)
