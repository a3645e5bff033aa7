# SPDX-License-Identifier: Apache-2.0
"""Canonical Megatron names: one spelling for a parameter, whatever wraps or splits the model.

Wrappers (`module.`, `language_model.`) are stripped, layers of a pipeline stage and experts of an expert-parallel
rank get their global numbers, and both spellings of experts become `experts.linear_fc1.weight{expert}`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from vime_convert.errors import NamesError
from vime_convert.megatron.parallel import Parallel
from vime_convert.rules import Bound, RuleTable

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_LOCAL_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
_GROUPED_EXPERT = re.compile(r"(?<!shared_)experts\.(linear_fc[12]\.weight)(\d+)$")
_LAYER_MODULE = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)$")
_WRAPPERS = ("module.", "language_model.")


class Entry(NamedTuple):
    """A parameter or persistent buffer of this rank."""

    bound: Bound
    tensor: torch.Tensor


def canonical(name: str, *, layer_offset: int = 0, expert_offset: int = 0) -> str:
    """The global name of a parameter.

    Args:
        name: as the module of this rank spells it.
        layer_offset: global index of the chunk's first layer.
        expert_offset: global index of the rank's first expert.
    """
    while wrapper := next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(wrapper)
    name = _LAYER.sub(lambda match: str(int(match[0]) + layer_offset), name)
    name = _LOCAL_EXPERT.sub(r"experts.\2\1", name)
    return _GROUPED_EXPERT.sub(lambda match: f"experts.{match[1]}{int(match[2]) + expert_offset}", name)


def layer_offset(chunk: torch.nn.Module) -> int:
    """Global index of the chunk's first layer, from the numbers that Megatron gives its layers (counted from 1)."""
    for name, module in chunk.named_modules():
        if (match := _LAYER_MODULE.search(name)) is not None:
            number = getattr(module, "layer_number", None)
            return 0 if number is None else int(number) - 1 - int(match[1])
    return 0


def entries(chunks: Sequence[torch.nn.Module], table: RuleTable, parallel: Parallel) -> Iterator[Entry]:
    """Every parameter and persistent buffer of this rank with its rule.

    Raises:
        NamesError: a parameter that no rule covers, or one that appears in two chunks.
    """
    seen: set[str] = set()
    experts = table.num_experts // parallel.ep.size * parallel.ep.rank
    for chunk in chunks:
        offset = layer_offset(chunk)
        for local_name, tensor in chunk.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor) or local_name.endswith("_extra_state"):
                continue  # state of TransformerEngine modules, no weights
            name = canonical(local_name, layer_offset=offset, expert_offset=experts)
            if name in seen:
                raise NamesError(f"{name}: appears twice in the model chunks of one rank")
            seen.add(name)
            yield Entry(table.find(name), tensor)
