# SPDX-License-Identifier: Apache-2.0
"""Model types that look supported and are not, each with the reason.

Apart from the registry, because the plugin lookup and the config readers need it too.
"""

from collections.abc import Mapping

from vime_convert.errors import ConfigError

REFUSED: Mapping[str, str] = {"deepseek_v41": "DeepSeek-V4.1 is a different architecture"}


def refuse_known(model_type: object) -> None:
    """Raises `ConfigError` with the reason if the model type is one that is refused on purpose."""
    if isinstance(model_type, str) and (reason := REFUSED.get(model_type)):
        raise ConfigError(f"config.json: model_type {model_type!r} is refused; {reason}")
