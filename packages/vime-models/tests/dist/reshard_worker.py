# SPDX-License-Identifier: Apache-2.0
"""The ranks of test_reshard.py: the command line of a layout, training, torch_dist checkpoints.

The directories of the Hugging Face checkpoint and of what is saved are given. On the CPU the optimizer is torch's, and
only weights load into another layout; on GPUs it is Megatron's distributed one, whose moments do as well.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import DEVICE, serve
from megatron.core import parallel_state
from step import CONFIG, LENGTHS, forward_backward, load, table, wrap

from vime_convert.megatron.exporter import export_tensors
from vime_models.dsv4.arguments import add_arguments, launch_flags
from vime_models.host import bringup, training
from vime_models.host.provider import make_provider

CHECKPOINT, SAVED = Path(sys.argv[1]) / "checkpoint", Path(sys.argv[2])
RATE, DECAY = 1e-3, 0.1

# Layout to sizes for the process groups and words for Megatron.
FLAGS: dict[str, tuple[dict[str, int], str]] = {
    "tp2-ep2": (
        {"tp": 2, "ep": 2},
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1",
    ),
    "ep2": ({"ep": 2}, "--expert-model-parallel-size 2"),
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
GPU_FLAGS = """
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-rope-fusion --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable
"""


def build(layout: str, directory: Path) -> Any:
    """The chunk of this rank, from parsed arguments."""
    sizes, words = FLAGS[layout]
    bringup.init_world(device=DEVICE, **sizes)
    common = f"""
        --seq-length {max(LENGTHS)} --micro-batch-size 1 --global-batch-size {len(LENGTHS)} --train-iters 4 --lr {RATE}
        --save-interval 1000 --tokenizer-type NullTokenizer --save {directory} --load {directory}
    """
    if DEVICE == "cuda":
        common += GPU_FLAGS
    args = training.parse([*launch_flags(CONFIG), *common.split(), *words.split()], add_arguments)
    model = make_provider(args)(
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return model.to(DEVICE).train()


class Trainer:
    """A model in DDP with its optimizer: weight decay, and a rate that moves every weight."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.chunks = wrap([model], use_distributed_optimizer=DEVICE == "cuda")
        if DEVICE == "cuda":
            from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

            settings = OptimizerConfig(
                optimizer="adam", lr=RATE, weight_decay=DECAY, use_distributed_optimizer=True, clip_grad=0.0
            )
            self.optimizer = get_megatron_optimizer(settings, self.chunks)
        else:
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)

    def steps(self, count: int) -> list[float]:
        """Mean losses of some training steps."""
        losses = []
        for _ in range(count):
            losses.append(mean_loss(forward_backward(self.chunks, "float32")))
            if DEVICE == "cpu":
                for parameter in self.model.parameters():
                    parameter.grad = getattr(parameter, "main_grad", None)
            self.optimizer.step()
            # What a parameter still holds would be added to DDP's own sum in the next backward pass.
            self.optimizer.zero_grad(set_to_none=True)
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        """Release name to whole tensor."""
        exported = export_tensors([self.model], table([self.model]))
        return {name: tensor.cpu().clone() for name, tensor in exported}


def mean_loss(step: Any) -> float:
    """Over all microbatches, on every rank."""
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, step.losses)
    losses = {number: loss for part in seen for number, loss in part.items()}
    return sum(losses.values()) / len(losses)


def save_and_resume(layout: str) -> dict[str, Any]:
    """Two steps, save, two more; then the same from the files. Leaves what the next layouts compare with."""
    directory = SAVED / layout
    (model,) = load([build(layout, directory)], CHECKPOINT)
    first = Trainer(model)
    first.steps(2)
    training.save(2, first.chunks, first.optimizer)
    saved = first.weights()
    rest = first.steps(2)
    after = first.weights()
    if dist.get_rank() == 0:
        torch.save({"weights": saved, "losses": rest}, directory / "expected.pt")

    second = Trainer(build(layout, directory))
    iteration = training.load(second.chunks, second.optimizer)
    resumed = second.steps(2)
    final = second.weights()
    return {
        "iteration": iteration,
        "rest": rest,
        "resumed": resumed,
        "moved": [name for name, tensor in after.items() if not tensor.equal(saved[name])],
        "differ": [name for name, tensor in after.items() if not tensor.equal(final[name])],
    }


def load_elsewhere(layout: str, source: str, *, moments: bool = True) -> dict[str, Any]:
    """Weights of one layout in another, and on GPUs the optimizer's state: relative differences of the next losses.

    Megatron keeps a second optimizer for experts if they are spread over ranks, so state moves only between layouts
    that both do that, or neither. Without `moments` it is left behind.
    """
    trainer = Trainer(build(layout, SAVED / source))
    movable = DEVICE == "cuda" and ("ep" in FLAGS[source][0]) == ("ep" in FLAGS[layout][0])
    training.load(trainer.chunks, trainer.optimizer if movable and moments else None)
    dist.barrier()
    expected = torch.load(SAVED / source / "expected.pt")
    loaded = trainer.weights()
    losses = trainer.steps(2 if movable else 1)
    return {
        "losses": [abs(a - b) / b for a, b in zip(losses, expected["losses"], strict=False)],
        "differ": [name for name, tensor in expected["weights"].items() if not tensor.equal(loaded[name])],
    }


CASES = {f"resume-{layout}": partial(save_and_resume, layout) for layout in FLAGS} | {
    f"{source}-to-{layout}": partial(load_elsewhere, layout, source) for source in FLAGS for layout in FLAGS
}
CASES["moments-lost"] = partial(load_elsewhere, "pp2", "tp2-etp2", moments=False)

if __name__ == "__main__":
    serve(CASES)
