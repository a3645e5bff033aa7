# SPDX-License-Identifier: Apache-2.0
"""The ranks of test_reshard.py: the command line of a layout, training, torch_dist checkpoints.

The directories of the Hugging Face checkpoint and of what is saved are given.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import serve
from megatron.core import parallel_state
from step import CONFIG, LENGTHS, load, table, train_step, wrap

from vime_convert.megatron.exporter import export_tensors
from vime_models.dsv4.arguments import add_arguments, launch_flags
from vime_models.host import bringup, training
from vime_models.host.provider import make_provider

CHECKPOINT, SAVED = Path(sys.argv[1]) / "checkpoint", Path(sys.argv[2])

# Layout to sizes for the process groups and words for Megatron.
FLAGS: dict[str, tuple[dict[str, int], str]] = {
    "tp2-ep2": (
        {"tp": 2, "ep": 2},
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1",
    ),
    "tp2-etp2": (
        {"tp": 2, "etp": 2},
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
    ),
    "pp2": ({"pp": 2}, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"),
    "dp2": ({}, ""),
    "pp2-draft": (
        {"pp": 2},
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 --mtp-num-layers 1",
    ),
    "dp2-draft": ({}, "--mtp-num-layers 1"),
}


def build(layout: str, directory: Path) -> Any:
    """The chunk of this rank, from parsed arguments."""
    sizes, words = FLAGS[layout]
    bringup.init_world(**sizes)
    common = f"""
        --seq-length {max(LENGTHS)} --micro-batch-size 1 --global-batch-size {len(LENGTHS)} --train-iters 4 --lr 1e-3
        --save-interval 1000 --tokenizer-type NullTokenizer --save {directory} --load {directory}
    """
    args = training.parse([*launch_flags(CONFIG), *common.split(), *words.split()], add_arguments)
    return make_provider(args)(
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).train()


def steps(model: Any, optimizer: torch.optim.Optimizer, wrapped: list[Any], count: int) -> list[float]:
    """Mean losses of some training steps."""
    losses = []
    for _ in range(count):
        losses.append(mean_loss(train_step(wrapped, "float32")))
        for parameter in model.parameters():
            parameter.grad = getattr(parameter, "main_grad", None)
        optimizer.step()
        # What a parameter still holds would be added to DDP's own sum in the next backward pass.
        optimizer.zero_grad(set_to_none=True)
    return losses


def mean_loss(step: Any) -> float:
    """Over all microbatches, on every rank."""
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, step.losses)
    losses = {number: loss for part in seen for number, loss in part.items()}
    return sum(losses.values()) / len(losses)


def trainable(model: Any) -> torch.optim.Optimizer:
    """Weight decay, and a rate that moves every weight."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Release name to whole tensor."""
    return {name: tensor.clone() for name, tensor in export_tensors([model], table([model]))}


def save_and_resume(layout: str) -> dict[str, Any]:
    """Two steps, save, two more; then the same from the files. Leaves what the next layouts compare with."""
    directory = SAVED / layout
    (model,) = load([build(layout, directory)], CHECKPOINT)
    optimizer, wrapped = trainable(model), wrap([model])
    steps(model, optimizer, wrapped, 2)
    training.save(2, [model], optimizer)
    saved = weights(model)
    rest = steps(model, optimizer, wrapped, 2)
    after = weights(model)
    if dist.get_rank() == 0:
        torch.save({"weights": saved, "loss": rest[0]}, directory / "expected.pt")

    model = build(layout, directory)
    optimizer = trainable(model)
    iteration = training.load([model], optimizer)
    resumed = steps(model, optimizer, wrap([model]), 2)
    final = weights(model)
    return {
        "iteration": iteration,
        "rest": rest,
        "resumed": resumed,
        "moved": [name for name, tensor in after.items() if not tensor.equal(saved[name])],
        "differ": [name for name, tensor in after.items() if not tensor.equal(final[name])],
    }


def load_elsewhere(layout: str, source: str) -> dict[str, Any]:
    """Weights of one layout in another."""
    model = build(layout, SAVED / source)
    training.load([model])
    dist.barrier()
    expected = torch.load(SAVED / source / "expected.pt")
    loaded = weights(model)
    loss = mean_loss(train_step(wrap([model]), "float32"))
    return {
        "loss": abs(loss - expected["loss"]) / expected["loss"],
        "differ": [name for name, tensor in expected["weights"].items() if not tensor.equal(loaded[name])],
    }


CASES = {f"resume-{layout}": partial(save_and_resume, layout) for layout in FLAGS} | {
    f"{source}-to-{layout}": partial(load_elsewhere, layout, source) for source in FLAGS for layout in FLAGS
}

if __name__ == "__main__":
    serve(CASES)
