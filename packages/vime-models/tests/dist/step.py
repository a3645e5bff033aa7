# SPDX-License-Identifier: Apache-2.0
"""One training step of a tiny DeepSeek-V4 in any layout, as a trainer runs it: Megatron's schedule, DDP and finaliser.

Every layout reads the same checkpoint, which initialises by global name, and the same microbatches: a data-parallel
rank takes every dp-th, a context-parallel rank its rows of each. So logits, loss and gradients (the mean over all
microbatches) must be those of one process.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import DEVICE
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from vime_convert.dsv4.names import rule_table
from vime_convert.megatron.exporter import export_tensors
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.reader import CheckpointReader
from vime_convert.rules import RuleTable
from vime_convert.tiny import make_tiny
from vime_convert.verify.compare import relative
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_models.dsv4.plugin import PLUGIN
from vime_models.host import cpu
from vime_replay.layout import PackLayout

CONFIG = next(case.config for case in PLUGIN.tiny_cases if case.name == "flash")
# The precisions in which layouts are compared with one process.
COMPARED = ("float64", "float32")
# By number of draft layers. The checkpoint has one; a model without it leaves it out.
TABLES = [rule_table(CONFIG, draft_layers=drafts) for drafts in (0, 1)]
# Pairs of one length, because the ranks of the allgather dispatcher must agree on it; even for sequence parallelism.
LENGTHS = (144, 144, 132, 132)
# The same for context parallelism, whose ranks need rows that cover a group of 128: sequences packed into each, of
# lengths that the zigzag order of four ranks can cut.
PACKS = ((40, 248), (152, 136), (8, 128, 152), (264, 24))


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


def microbatches(packed: bool = False) -> list[torch.Tensor]:
    """Token ids [1, rows + 1]: inputs and, one further, labels. Packed sequences count as one row of text."""
    # Seeds whose draws keep every selection of the checkpoint away from ties, and every value from its clamp.
    generator = torch.Generator().manual_seed(12 if packed else 7)
    rows = [sum(pack) for pack in PACKS] if packed else LENGTHS
    return [torch.randint(CONFIG["vocab_size"], (1, n + 1), generator=generator).to(DEVICE) for n in rows]


def packing(number: int) -> PackedSeqParams:
    """Where the sequences of a packed microbatch begin."""
    cu_seqlens = torch.tensor([0, *PACKS[number]]).cumsum(0).to(device=DEVICE, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)


def own_rows(number: int, config: Any) -> torch.Tensor:
    """Rows of a packed microbatch that this context-parallel rank is given."""
    layout = PackLayout(
        PACKS[number],
        mode=config.vime_dsv4.cp_layout,
        cp_size=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
    )
    return torch.from_numpy(layout.rows("local")).to(DEVICE)


def shared_checkpoint(config: dict[str, Any], directory: Path) -> CheckpointReader:
    """A tiny checkpoint in the directory, which the first rank writes when the ranks first ask for it."""
    if not directory.exists():
        dist.barrier()
        if dist.get_rank() == 0:
            make_tiny(config, directory, seed=0, plugin=PLUGIN)
        dist.barrier()
    return CheckpointReader(directory)


def build(precision: str, **layout: Any) -> list[Any]:
    """The chunks of this rank in training mode, without values."""
    chosen = PRECISIONS[precision]
    # As Megatron's argument parser sets it: a stage frees what it has sent.
    layout |= {"deallocate_pipeline_outputs": True}
    with running_in(chosen):
        chunks = PLUGIN.build(CONFIG, dtype=chosen.dtype, device=DEVICE, **layout)
    return [chunk.train() for chunk in chunks]


def table(chunks: list[Any]) -> RuleTable:
    """The rules of a model with or without a draft layer."""
    return TABLES[chunks[0].config.mtp_num_layers or 0]


def load(chunks: list[Any], directory: Path) -> list[Any]:
    """The same chunks, with the values of a checkpoint."""
    load_checkpoint(chunks, CheckpointReader(directory), table(chunks))
    return chunks


def wrap(chunks: list[Any], **settings: Any) -> list[Any]:
    """The chunks in Megatron's DDP, which owns the gradients; with further settings of its."""
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(**settings)
    with cpu.cuda_literals_to_cpu():
        return [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]


def train_step(wrapped: list[Any], precision: str) -> Step:
    """Forward and backward of all microbatches; nothing is updated. With context parallelism they are packed."""
    step = forward_backward(wrapped, precision)
    with running_in(PRECISIONS[precision]), cpu.cuda_literals_to_cpu():
        grads = export_tensors(wrapped, table(wrapped), value=lambda p: getattr(p, "main_grad", None))
        step.grads = {name: grad.clone() for name, grad in grads}
    return step


def forward_backward(
    wrapped: list[Any], precision: str, *, first: int = 0, packed: bool | None = None
) -> Step:
    """Logits and losses; the gradients are in the buffers of DDP, summed from microbatch `first` on.

    Microbatches are packed with context parallelism, or as `packed` says.
    """
    step, config = Step(), wrapped[0].config
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    if packed is None:
        packed = parallel_state.get_context_parallel_world_size() > 1
    every = list(enumerate(microbatches(packed)))
    batches = (every[first:] + every[:first])[rank::size]

    def forward_step(queue: Any, model: Any) -> Any:
        number, ids = next(queue)
        rows = own_rows(number, config) if packed else torch.arange(ids.shape[1] - 1, device=DEVICE)
        core = model.module
        if core.post_process:
            handle = core.output_layer.register_forward_hook(
                lambda _module, _inputs, output: step.logits.__setitem__(
                    number, _whole(output[0], rows, ids.shape[1] - 1)
                )
            )
        inputs, labels = ids[:, :-1][:, rows], ids[:, 1:][:, rows]
        params = packing(number) if packed else None
        output = model(inputs, None, None, labels=labels, packed_seq_params=params)
        if core.post_process:
            handle.remove()
        return output, partial(_loss, number=number, total=ids.shape[1] - 1, step=step)

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
    return step


def _loss(per_token: torch.Tensor, *, number: int, total: int, step: Step) -> Any:
    """This rank's part of the mean over the microbatch; Megatron's schedule expects parts of a mean."""
    part = per_token.sum() / total
    mean = part.detach().clone()
    dist.all_reduce(mean, group=parallel_state.get_context_parallel_group())
    step.losses[number] = mean.item()
    return part, {}


def _whole(logits: torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
    """Logits [total, b, V] of all ranks' rows over the whole vocabulary, from this rank's part."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.detach().contiguous(), group=group)
    own = torch.cat(parts, -1)[..., : CONFIG["vocab_size"]]
    stream = own.new_zeros(total, *own.shape[1:])
    stream[rows] = own
    dist.all_reduce(stream, group=parallel_state.get_context_parallel_group())
    return stream


def difference(step: Step, reference: Step) -> dict[str, Any]:
    """Largest relative differences, and which gradient has it."""
    return {
        "logits": max([relative(step.logits[i], reference.logits[i]) for i in step.logits], default=0.0),
        "losses": max([abs(step.losses[i] - reference.losses[i]) for i in step.losses], default=0.0),
        "compared": [len(step.logits), len(reference.grads)],
        "unknown": sorted(step.grads.keys() - reference.grads.keys()),
        **worst_gradient(step.grads, reference.grads),
    }


def worst_gradient(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The largest relative difference, and whose it is; what is nothing beside the others may differ by more."""
    floor = 1e-8 * torch.stack([grad.norm() for grad in expected.values()]).norm().item()
    errors = {name: relative(found[name], grad, floor) for name, grad in expected.items()}
    worst = max(errors, key=lambda name: errors[name])
    return {"grads": errors[worst], "worst": worst}
