# SPDX-License-Identifier: Apache-2.0
"""Parameters that stay in float32 while the rest of the model is cast to bfloat16.

Megatron's `Float16Module` casts every floating tensor of a model. A tensor that the checkpoint and the
rollout engine keep in float32 is marked where it is created, and `enforce` restores the marked ones after the
cast and before weights are loaded or an optimizer is built.
"""

from collections.abc import Iterable, Iterator

import torch

_MARK = "vime_dtype"


def mark_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """The same parameter or buffer, marked to hold at least float32."""
    setattr(tensor, _MARK, torch.float32)
    return tensor


def _marked(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module.parameters(), *module.buffers()):
        if getattr(tensor, _MARK, None) is not None:
            yield tensor


def enforce(chunks: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
    """Widen every marked tensor that a cast has narrowed, in place: the `Parameter` objects stay the same.

    The bits that the cast removed are gone, so load or initialise the marked tensors afterwards. A float64
    model (used in proofs) is left as it is.

    Args:
        chunks: a module or the model chunks of this rank, wrapped or not.
    """
    for module in [chunks] if isinstance(chunks, torch.nn.Module) else chunks:
        for tensor in _marked(module):
            wanted: torch.dtype = getattr(tensor, _MARK)
            if torch.finfo(tensor.dtype).bits < torch.finfo(wanted).bits:
                tensor.data = tensor.data.to(wanted)
