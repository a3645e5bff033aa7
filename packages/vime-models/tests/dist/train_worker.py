# SPDX-License-Identifier: Apache-2.0
"""The ranks of multi_gpu/test_training.py: 20 steps in bfloat16 with Megatron's distributed optimizer.

The directory of the checkpoint is given. Megatron checks for CUDA tensors, so this runs on GPUs only.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import serve
from layouts import LAYOUTS, NCCL_LAYOUTS
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from step import build, forward_backward, load, wrap

CHECKPOINT = Path(sys.argv[1]) / "checkpoint"
STEPS = 20


def curve(
    first: int = 0,
    packed: bool | None = None,
    plant: Callable[[Any], None] | None = None,
    **layout: Any,
) -> list[float]:
    """Mean loss of each step.

    Args:
        first: microbatch that is summed first; what it changes is rounding.
        packed: as in `forward_backward`.
        plant: puts a bug into the model.
        **layout: options of the build.
    """
    chunks = load(build("bfloat16", **layout), CHECKPOINT)
    if plant is not None:
        plant(chunks[0])
    wrapped = wrap(chunks, use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=5e-4,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(settings, wrapped)
    losses = []
    for _ in range(STEPS):
        step = forward_backward(wrapped, "bfloat16", first=first, packed=packed)
        optimizer.step()
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, step.losses)
        found = {number: loss for part in seen for number, loss in part.items()}
        losses.append(sum(found.values()) / len(found))
    return losses


def lose_gradients_of_the_second_rank(model: Any) -> None:
    """What a sum over data-parallel ranks that leaves one out does; the losses stay as they are."""

    def lose(_model: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.detach() + 0 * output

    if dist.get_rank() == 1:
        model.register_forward_hook(lose)


CASES = {
    **{f"one-{first}": partial(curve, first) for first in range(4)},
    **{f"packed-{first}": partial(curve, first, packed=True) for first in range(4)},
    **{name: partial(curve, **options) for name, (_, options) in (LAYOUTS | NCCL_LAYOUTS).items()},
    "ep2-lost-rank": partial(curve, plant=lose_gradients_of_the_second_rank, ep=2),
}

if __name__ == "__main__":
    serve(CASES)
