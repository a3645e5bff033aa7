# SPDX-License-Identifier: Apache-2.0
"""The ranks of the tests beside it; the directory of the checkpoint and of what one process computes is given.

A case is one layout, or one property of several layouts.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import DEVICE, serve
from layouts import LAYOUTS, NCCL_LAYOUTS, RECOMPUTATIONS, RECOMPUTED_LAYOUTS, REFUSED
from step import (
    COMPARED,
    CONFIG,
    TABLES,
    Step,
    build,
    difference,
    load,
    microbatches,
    packing,
    train_step,
    wrap,
)

from vime_convert.megatron.exporter import export_tensors
from vime_convert.tiny import make_tiny
from vime_convert.verify.compare import relative
from vime_convert.verify.margins import Margins
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_models.dsv4 import validation
from vime_models.dsv4.config import DSv4OptionError
from vime_models.dsv4.tiny import init_tiny

HERE = Path(sys.argv[1])


def reference() -> dict[str, float]:
    """Writes the checkpoint and what one process computes with plain autograd.

    Returns how close a selection came to a tie, and a value to the bound of its clamp, where rounding decides.
    """
    make_tiny(CONFIG, HERE / "checkpoint", seed=0, table=TABLES[1], init=init_tiny)
    margins = []
    for precision in COMPARED:
        margins += [reference_step(precision, packed) for packed in (False, True)]
        reference_with_draft(precision)
    gaps, clamps = zip(*margins, strict=True)
    return {"gap": min(gaps), "clamp": min(clamps)}


def reference_step(precision: str, packed: bool) -> tuple[float, float]:
    """One step without Megatron's schedule, to a file; its margins to a tie and to a clamp."""
    (model,) = load(build(precision), HERE / "checkpoint")
    model.zero_grad()
    step, batches = Step(), microbatches(packed)

    def forward(number: int) -> torch.Tensor:
        params = packing(number) if packed else None
        logits: torch.Tensor = model(batches[number][:, :-1], None, None, packed_seq_params=params)
        return logits

    with running_in(PRECISIONS[precision]):
        with torch.no_grad():
            # Rotation tables are made on first use, and their ramp touches its bounds.
            model(batches[0][:, :8], None, None)
        with torch.no_grad(), Margins() as margins, indexer_gaps(model) as gaps:
            for number in range(len(batches)):
                forward(number)
        for number, ids in enumerate(batches):
            logits = forward(number)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[0, 1:])
            (loss / len(batches)).backward()
            step.logits[number], step.losses[number] = logits.detach().transpose(0, 1), loss.item()
    step.grads = dict(export_tensors([model], TABLES[0], value=lambda p: p.grad))
    torch.save(vars(step), HERE / f"{precision}{'-packed' if packed else ''}.pt")
    return min(margins.topk, *gaps), margins.clamp


def reference_with_draft(precision: str) -> None:
    """The same for a model with a draft layer, whose loss Megatron adds to the model's."""
    chunks = load(build(precision, mtp_num_layers=1), HERE / "checkpoint")
    step = train_step(wrap(chunks), precision)
    torch.save(vars(step), HERE / f"{precision}-draft.pt")


@contextmanager
def indexer_gaps(model: Any) -> Iterator[list[float]]:
    """Distances between the last entry that an indexer keeps and the first that it leaves out."""
    gaps: list[float] = []
    attentions = [layer.self_attention for layer in model.decoder.layers]
    indexers = [attention.indexer for attention in attentions if attention.compress_ratio == 4]
    original = indexers[0].topk_fn

    def watched(
        scores: torch.Tensor, k: int, starts: torch.Tensor, ends: torch.Tensor, **keywords: Any
    ) -> torch.Tensor:
        column = torch.arange(scores.shape[1], device=scores.device)
        visible = (column >= starts[:, None]) & (column < ends[:, None])
        best = scores.masked_fill(~visible, float("-inf")).sort(-1, descending=True).values
        if best.shape[1] > k:
            cut = (best[:, k - 1] - best[:, k])[best[:, k].isfinite()]
            gaps.extend(cut.min(0, keepdim=True).values.tolist() if len(cut) else [])
        return original(scores, k, starts, ends, **keywords)

    for indexer in indexers:
        indexer.topk_fn = watched
    try:
        yield gaps
    finally:
        for indexer in indexers:
            indexer.topk_fn = original


def run(precision: str, plant: Callable[[Any], None] | None = None, **layout: Any) -> Step:
    """One step of a layout, with a bug planted in the model if one is given."""
    chunks = load(build(precision, **layout), HERE / "checkpoint")
    if plant is not None:
        plant(chunks[0])
    return train_step(wrap(chunks), precision)


def equals_one_process(precision: str, **options: Any) -> dict[str, Any]:
    """How far a layout is from one process."""
    kind = "-draft" if options.get("mtp_num_layers") else "-packed" if options.get("cp", 1) > 1 else ""
    reference = torch.load(HERE / f"{precision}{kind}.pt", map_location=DEVICE)
    return difference(run(precision, **options), Step(**reference))


def unsummed_stream_gradients(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if ".hc_" in name:
            parameter.sequence_parallel = False


def unsummed_key_gradients(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.self_attention._shared = lambda keys: keys


def recomputed(layout: dict[str, Any], recomputation: dict[str, Any]) -> list[str]:
    """Which gradients recomputation changes in float32, by as little as a bit."""
    plain, again = run("float32", **layout), run("float32", **layout, **recomputation)
    assert plain.grads.keys() == again.grads.keys()
    assert plain.losses == again.losses
    return [name for name, grad in plain.grads.items() if not grad.equal(again.grads[name])]


def interleaved() -> dict[str, Any]:
    """Logits of two stages of two chunks each, uneven, whose chunks are called one after the other.

    Megatron's interleaved schedule hangs over gloo; what is left of it here is what it is given: which layers,
    which ends and which weights each chunk has.
    """
    with mock.patch.object(validation, "on_gloo", return_value=False):
        chunks = load(build("float64", **REFUSED["virtual"]), HERE / "checkpoint")
    rank, ids = dist.get_rank(), microbatches()[0]
    streams = torch.zeros(ids.shape[1] - 1, 1, CONFIG["hidden_size"] * CONFIG["hc_mult"], dtype=torch.float64)
    with torch.no_grad(), running_in(PRECISIONS["float64"]):
        for number in range(4):
            if rank == number % 2:
                chunks[number // 2].set_input_tensor(streams)
                output = chunks[number // 2](ids[:, :-1], None, None)
                streams = output if number < 3 else streams
            dist.broadcast(streams, src=number % 2)
    if rank == 0:
        return {}
    expected = Step(**torch.load(HERE / "float64.pt")).logits[0]
    return {"logits": relative(output.transpose(0, 1), expected)}


def refusals() -> dict[str, str]:
    """What a layout that cannot work says."""
    said = {}
    for name, layout in REFUSED.items():
        try:
            build("float32", **layout)
        except DSv4OptionError as error:
            said[name] = str(error)
    return said


CASES = {
    "reference": reference,
    **{
        f"{name}-{precision}": partial(equals_one_process, precision, **options)
        for name, (_, options) in (LAYOUTS | NCCL_LAYOUTS).items()
        for precision in COMPARED
    },
    **{
        f"{layout}-recompute-{name}": partial(recomputed, LAYOUTS[layout][1], options)
        for layout in RECOMPUTED_LAYOUTS
        for name, options in RECOMPUTATIONS.items()
    },
    "interleaved": interleaved,
    "refusals": refusals,
    "unsummed-streams": partial(equals_one_process, "float64", plant=unsummed_stream_gradients, tp=2),
    "unsummed-keys": partial(equals_one_process, "float64", plant=unsummed_key_gradients, tp=2),
}

if __name__ == "__main__":
    serve(CASES)
