# SPDX-License-Identifier: Apache-2.0
"""Our model and transformers' on the same tiny checkpoint: built once per session, shared by the tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vime_convert.megatron.exporter import export_tensors
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.plugin import TinyCase
from vime_convert.reader import CheckpointReader
from vime_convert.rules import RuleTable
from vime_convert.tiny import make_tiny
from vime_convert.verify.margins import Margins
from vime_convert.verify.precision import PRECISIONS, Precision, running_in
from vime_models.dsv4.plugin import PLUGIN
from vime_models.dsv4.tiny import TINY_CASES

CASES = {case.name: case for case in TINY_CASES}


@dataclass
class Run:
    """Logits, streams after each layer, and gradients by release name."""

    logits: torch.Tensor
    streams: list[torch.Tensor]
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass
class Twin:
    """One tiny checkpoint, read by both programs."""

    case: TinyCase
    precision: Precision
    directory: Path
    table: RuleTable
    ours: Any
    theirs: Any
    ids: torch.Tensor

    def running(self) -> Any:
        return running_in(self.precision)

    def logits(self, ids: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """Ours, without gradients."""
        with self.running(), torch.no_grad():
            return self.ours(self.ids if ids is None else ids, None, None, **kwargs)

    def run_ours(self) -> Run:
        streams: dict[int, torch.Tensor] = {}
        handles = PLUGIN.layer_states([self.ours], lambda i, s: streams.__setitem__(i, s.detach()))
        self.ours.zero_grad()
        with self.running(), removing(handles):
            logits = PLUGIN.forward([self.ours], self.ids)
            next_token_loss(logits, self.ids).backward()
            grads = dict(export_tensors([self.ours], self.table, value=lambda p: p.grad))
        return Run(logits.detach(), [streams[i] for i in sorted(streams)], grads)

    def run_theirs(self) -> Run:
        streams: list[torch.Tensor] = []
        layers = self.theirs.model.layers
        handles = [
            layer.register_forward_hook(lambda _m, _i, output: streams.append(output.detach()))
            for layer in layers
        ]
        self.theirs.zero_grad()
        with self.running(), removing(handles):
            logits = self.theirs(self.ids, use_cache=False).logits
            next_token_loss(logits, self.ids).backward()
        module_names = self.table.dialect("hf-module")
        parameters = dict(self.theirs.named_parameters())
        grads = {}
        for name in self.table.expected_hf():
            slot = module_names.slot(name)
            if slot.stored not in parameters or parameters[slot.stored].grad is None:
                continue
            grad = parameters[slot.stored].grad
            grads[name] = (grad if slot.expert is None else grad[slot.expert]).chunk(slot.parts)[slot.part]
        return Run(logits.detach(), streams, grads)


@contextmanager
def removing(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def draw_ids(model: Any, precision: Precision, case: TinyCase) -> torch.Tensor:
    """Token ids that keep both programs away from top-k ties and clamp edges, where rounding decides."""
    for attempt in range(50):
        generator = torch.Generator().manual_seed(attempt)
        ids = torch.randint(case.config["vocab_size"], (1, case.seq_len), generator=generator)
        with torch.no_grad(), running_in(precision), Margins() as margins:
            model(ids, use_cache=False)
        if margins.topk >= 1e-5 and margins.clamp >= 1e-6:
            return ids
    raise AssertionError(f"every draw of {case.name} is close to a tie")


@pytest.fixture(scope="session", autouse=True)
def one_process() -> None:
    torch.set_num_threads(1)
    PLUGIN.setup("cpu")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a case's checkpoint."""

    @cache
    def write(name: str) -> Path:
        directory = tmp_path_factory.mktemp("tiny") / name
        make_tiny(CASES[name].config, directory, seed=0, plugin=PLUGIN)
        return directory

    return write


@pytest.fixture(scope="session")
def build(checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    """A fresh model of ours with a case's weights."""

    def build(name: str, precision: str = "float32", **options: Any) -> Any:
        config, chosen = CASES[name].config, PRECISIONS[precision]
        with running_in(chosen):
            (model,) = PLUGIN.build(config, dtype=chosen.dtype, device="cpu", **options)
        load_checkpoint([model], CheckpointReader(checkpoint(name)), PLUGIN.rules(config))
        return model

    return build


def make_twin(case: TinyCase, chosen: Precision, directory: Path, ours: Any) -> Twin:
    """Our model and transformers' of the checkpoint in `directory`, with token ids that suit both."""
    with running_in(chosen):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=chosen.dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
    ids = draw_ids(theirs, chosen, case)
    return Twin(case, chosen, directory, PLUGIN.rules(case.config), ours, theirs, ids)


@pytest.fixture(scope="session")
def twin_of() -> Callable[..., Twin]:
    """For a model that is not one of the cases."""
    return make_twin


@pytest.fixture(scope="session")
def twin(checkpoint: Callable[[str], Path], build: Callable[..., Any]) -> Callable[..., Twin]:
    """Both programs on a case's checkpoint; shared, so restore what a test changes."""

    @cache
    def make(name: str, precision: str = "float32") -> Twin:
        return make_twin(CASES[name], PRECISIONS[precision], checkpoint(name), build(name, precision))

    return make
