# SPDX-License-Identifier: Apache-2.0
"""A plugin as small as one can be: what `--spec` may name, and mistakes."""

from typing import Any

NOT_A_SPEC = 3


def get_spec(args: Any, config: Any = None, vp_stage: int | None = None) -> Any:
    from vime_models.controls.common import get_control_spec

    args.seen_by_spec = (type(config).__name__, vp_stage)
    return get_control_spec(args, config, vp_stage)


def get_spec_of_config(config: Any, vp_stage: int | None = None) -> Any:
    return ("config convention", config, vp_stage)


def get_nothing(args: Any, config: Any, vp_stage: int | None) -> None:
    return None


def get_provider(args: Any, config: Any, vp_stage: int | None) -> Any:
    def provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
        return ("provider", pre_process, post_process, vp_stage)

    return provider
