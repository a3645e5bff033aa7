# SPDX-License-Identifier: Apache-2.0
"""One training step of a tiny DeepSeek-V4 in any layout, as a trainer runs it: Megatron's schedule, DDP and finaliser.

Every layout reads the same checkpoint, which initialises by global name, and the same microbatches: a data-parallel
rank takes every dp-th. So logits, loss and gradients (the mean over all microbatches) must be those of one process.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from vime_convert.dsv4.names import rule_table
from vime_convert.megatron.exporter import export_tensors
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.reader import CheckpointReader
from vime_convert.rules import RuleTable
from vime_convert.verify.compare import relative
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_models.dsv4.plugin import PLUGIN
from vime_models.host import cpu

CONFIG = next(case.config for case in PLUGIN.tiny_cases if case.name == "flash")
# By number of draft layers. The checkpoint has one; a model without it leaves it out.
TABLES = [rule_table(CONFIG, draft_layers=drafts) for drafts in (0, 1)]
# Pairs of one length, because the ranks of the allgather dispatcher must agree on it; even for sequence parallelism.
LENGTHS = (144, 144, 132, 132)


@dataclass
class Step:
    """What one step computed.

    Attributes:
        logits: microbatch to logits [s, b, vocabulary], of the microbatches that this rank saw the end of.
        losses: microbatch to mean loss, of the same.
        grads: release name to gradient; whole, on every rank.
    """

    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


def microbatches() -> list[torch.Tensor]:
    """Token ids [1, length + 1]: inputs and, one further, labels."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(CONFIG["vocab_size"], (1, length + 1), generator=generator) for length in LENGTHS]


def build(precision: str, **layout: Any) -> list[Any]:
    """The chunks of this rank in training mode, without values."""
    chosen = PRECISIONS[precision]
    # As Megatron's argument parser sets it: a stage frees what it has sent.
    layout |= {"deallocate_pipeline_outputs": True}
    with running_in(chosen):
        chunks = PLUGIN.build(CONFIG, dtype=chosen.dtype, device="cpu", **layout)
    return [chunk.train() for chunk in chunks]


def table(chunks: list[Any]) -> RuleTable:
    """The rules of a model with or without a draft layer."""
    return TABLES[chunks[0].config.mtp_num_layers or 0]


def load(chunks: list[Any], directory: Path) -> list[Any]:
    """The same chunks, with the values of a checkpoint."""
    load_checkpoint(chunks, CheckpointReader(directory), table(chunks))
    return chunks


def wrap(chunks: list[Any]) -> list[Any]:
    """The chunks in Megatron's DDP, which owns the gradients."""
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(overlap_grad_reduce=False)
    with cpu.cuda_literals_to_cpu():
        return [DistributedDataParallel(config, settings, chunk) for chunk in chunks]


def train_step(wrapped: list[Any], precision: str) -> Step:
    """Forward and backward of all microbatches; nothing is updated."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    batches = list(enumerate(microbatches()))[rank::size]
    step = Step()

    def forward_step(queue: Any, model: Any) -> Any:
        number, ids = next(queue)
        core = model.module
        if core.post_process:
            handle = core.output_layer.register_forward_hook(
                lambda _module, _inputs, output: step.logits.__setitem__(number, _whole_rows(output[0]))
            )
        output = model(ids[:, :-1], None, None, labels=ids[:, 1:])
        if core.post_process:
            handle.remove()

        def loss(per_token: torch.Tensor) -> Any:
            mean = per_token.mean()
            step.losses[number] = mean.item()
            return mean, {}

        return output, loss

    with running_in(PRECISIONS[precision]), cpu.cuda_literals_to_cpu():
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in wrapped] if len(wrapped) > 1 else iter(batches),
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=len(batches),
            seq_length=max(LENGTHS),
            micro_batch_size=1,
        )
        grads = export_tensors(wrapped, table(wrapped), value=lambda p: getattr(p, "main_grad", None))
        step.grads = {name: grad.clone() for name, grad in grads}
    return step


def _whole_rows(logits: torch.Tensor) -> torch.Tensor:
    """Logits over the whole vocabulary, from this rank's part."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    torch.distributed.all_gather(parts, logits.detach().contiguous(), group=group)
    return torch.cat(parts, -1)[..., : CONFIG["vocab_size"]]


def difference(step: Step, reference: Step) -> dict[str, Any]:
    """Largest relative differences, and which gradient has it."""
    floor = 1e-8 * torch.stack([grad.norm() for grad in reference.grads.values()]).norm().item()
    grads = {name: relative(step.grads[name], grad, floor) for name, grad in reference.grads.items()}
    worst = max(grads, key=lambda name: grads[name])
    return {
        "logits": max([relative(step.logits[i], reference.logits[i]) for i in step.logits], default=0.0),
        "losses": max([abs(step.losses[i] - reference.losses[i]) for i in step.losses], default=0.0),
        "grads": grads[worst],
        "worst": worst,
        "compared": [len(step.logits), len(grads)],
        "unknown": sorted(step.grads.keys() - grads.keys()),
    }
