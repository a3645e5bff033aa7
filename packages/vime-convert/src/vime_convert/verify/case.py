# SPDX-License-Identifier: Apache-2.0
"""One case of a verification: a checkpoint, a sequence, every comparison, one result."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vime_convert.plugin import ModelPlugin
from vime_convert.verify.compare import Check, LayerError, compare_forward, compare_gradients
from vime_convert.verify.pinned import compare_pinned
from vime_convert.verify.precision import PRECISIONS, Precision
from vime_convert.verify.roundtrip import check_round_trips
from vime_convert.verify.runs import Candidate, Reference, draw_ids

CHECKS = ("logits", "grad", "roundtrip")


@dataclass
class CaseResult:
    """Everything measured on one case.

    Attributes:
        name: case name.
        covers: what it exercises, in words.
        seq_len: tokens of the sequence.
        layers: the kind of each layer, for the plot's axis.
        checks: all comparisons in the order in which they ran.
        layer_errors: per precision, the difference of the streams after each layer.
        seconds: wall time.
    """

    name: str
    covers: str
    seq_len: int
    layers: list[str]
    checks: list[Check] = field(default_factory=list)
    layer_errors: dict[str, list[LayerError]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)


def layer_labels(config: dict[str, Any]) -> list[str]:
    """Short word for each decoder layer, from whichever schedule the config has."""
    count = config["num_hidden_layers"]
    words = config.get("compress_ratios") or config.get("layer_types") or ["layer"] * count
    return [str(word).removesuffix("_attention") for word in words[:count]]


def run_case(
    plugin: ModelPlugin,
    directory: Path,
    *,
    name: str,
    seq_len: int,
    covers: str = "",
    checks: Sequence[str] = CHECKS,
    precisions: Sequence[str] = ("float64", "float32"),
    device: str = "cpu",
    seed: int = 1,
    tick: Callable[[str], None] = lambda _step: None,
) -> CaseResult:
    """Runs both programs on the checkpoint in `directory` and compares them.

    Args:
        plugin: the model.
        directory: a checkpoint that transformers can read.
        name: name for the report.
        seq_len: tokens of the drawn sequence.
        covers: what the case exercises, for the report.
        checks: any of "logits", "grad", "roundtrip"; gradients need the forward pass and imply "logits".
        precisions: names from `PRECISIONS`, strictest first.
        device: "cpu" or "cuda".
        seed: seed of the token ids.
        tick: called with the name of each step as it begins.
    """
    begin = time.monotonic()
    config = json.loads((directory / "config.json").read_text())
    result = CaseResult(name, covers, seq_len, layer_labels(config))
    candidate: Candidate | None = None
    ids: torch.Tensor | None = None
    for precision in (PRECISIONS[p] for p in precisions):
        if not {"logits", "grad"} & set(checks):
            break
        tick(f"{name}: {precision.name}, transformers")
        pinned = precision.dtype is torch.bfloat16
        reference = Reference(directory, _STORAGE if pinned else precision, device, plugin.rules(config))
        if ids is None:
            ids = draw_ids(reference, config["vocab_size"], seq_len, seed)
        if pinned:
            tick(f"{name}: {precision.name}, Megatron")
            candidate = Candidate(plugin, config, directory, precision, device)
            forward, result.layer_errors[precision.name] = compare_pinned(
                reference, candidate, ids, precision
            )
            result.checks += forward
            continue
        expected = reference.run(ids, gradients="grad" in checks)
        del reference
        tick(f"{name}: {precision.name}, Megatron")
        candidate = Candidate(plugin, config, directory, precision, device)
        ours = candidate.run(ids, gradients="grad" in checks)
        forward, errors = compare_forward(ours, expected, precision)
        result.checks += forward
        result.layer_errors[precision.name] = errors
        if "grad" in checks:
            result.checks += compare_gradients(ours, expected, precision)
    if "roundtrip" in checks:
        tick(f"{name}: round trips")
        if candidate is None or candidate.precision.dtype is not torch.float32:
            candidate = Candidate(plugin, config, directory, _STORAGE, device)
        with tempfile.TemporaryDirectory(prefix="vime-roundtrip-") as scratch:
            result.checks += check_round_trips(candidate, directory, Path(scratch))
    result.seconds = time.monotonic() - begin
    return result


# Every stored dtype (bf16, fp32, integers) survives a stay in fp32 parameters bit for bit.
_STORAGE: Precision = PRECISIONS["float32"]
