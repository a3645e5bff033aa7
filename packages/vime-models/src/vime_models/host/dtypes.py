# SPDX-License-Identifier: Apache-2.0
"""Parameters that stay in float32 while the rest of the model is cast to bfloat16.

Megatron's `Float16Module` casts every floating tensor of a model. A tensor that the checkpoint and the
rollout engine keep in float32 is marked where it is created, and `enforce` restores the marked ones after the
cast and before weights are loaded or an optimizer is built.
"""

from collections.abc import Iterable

import torch

_MARK = "vime_dtype"


def mark_fp32(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The same parameter, marked to hold at least float32.

    Parameters only: a cast replaces a buffer by a new tensor, on which no mark can survive.
    """
    setattr(parameter, _MARK, torch.float32)
    return parameter


def enforce(chunks: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
    """Widen every marked parameter that a cast has narrowed, in place: the `Parameter` objects stay the same.

    The bits that the cast removed are gone, so load or initialise the marked parameters afterwards. A float64
    model (used in proofs) is left as it is.

    Args:
        chunks: a module or the model chunks of this rank, wrapped or not.
    """
    for module in [chunks] if isinstance(chunks, torch.nn.Module) else chunks:
        for parameter in module.parameters():
            wanted: torch.dtype | None = getattr(parameter, _MARK, None)
            if wanted is not None and torch.finfo(parameter.dtype).bits < torch.finfo(wanted).bits:
                parameter.data = parameter.data.to(wanted)
