# SPDX-License-Identifier: Apache-2.0
"""The two sides of a comparison: transformers reads the checkpoint, and Megatron reads the same checkpoint.

The reference loads the directory with transformers' own loading code, so an error in our names or layouts cannot
cancel out. Gradients of both sides are brought to release names: ours through the rule table that also exports
weights, the reference's through the table's in-memory dialect.
"""

from pathlib import Path
from typing import Any

import torch

from vime_convert.errors import ConvertError
from vime_convert.megatron.exporter import export_tensors
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.plugin import ModelPlugin
from vime_convert.reader import CheckpointReader
from vime_convert.rules import RuleTable
from vime_convert.verify.compare import Trace
from vime_convert.verify.margins import Margins, RowGaps
from vime_convert.verify.precision import Precision, running_in

# Two float32 programs differ by less than this before a selection or a clamp, so neither crosses the edge alone. On an
# H200 a value 1.4e-6 from its bound was on either side of it, which showed as 5 % of one gradient.
TOPK_MARGIN, CLAMP_MARGIN = 1e-5, 5e-6


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of every token given those before it."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def draw_ids(reference: "Reference", vocab_size: int, length: int, seed: int) -> torch.Tensor:
    """Token ids [1, length] on which the reference keeps the distances `TOPK_MARGIN` and `CLAMP_MARGIN`.

    Raises:
        ConvertError: no such sequence in 50 draws; the weights tie by construction.
    """
    best = (0.0, 0.0)
    for attempt in range(50):
        generator = torch.Generator().manual_seed(seed * 1000 + attempt)
        ids = torch.randint(vocab_size, (1, length), generator=generator)
        margins = reference.margins(ids)
        if margins.topk >= TOPK_MARGIN and margins.clamp >= CLAMP_MARGIN:
            return ids
        best = max(best, (margins.topk, margins.clamp))
    raise ConvertError(
        f"in 50 draws of {length} tokens every sequence came closer than {TOPK_MARGIN} to a top-k tie or closer than "
        f"{CLAMP_MARGIN} to a clamp bound (best draw: {best[0]:.1e} and {best[1]:.1e}); such a comparison means "
        "nothing, use more indexer heads or other weights"
    )


class Reference:
    """The checkpoint as transformers sees it."""

    def __init__(self, directory: Path, precision: Precision, device: str, table: RuleTable) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.precision, self.device, self.table = precision, device, table
        with running_in(precision):
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=precision.dtype, attn_implementation="eager", experts_implementation="eager"
            ).to(device)
        self.model.eval()

    def margins(self, ids: torch.Tensor) -> Margins:
        """The closest discrete decisions of a forward pass over `ids`."""
        with torch.no_grad(), running_in(self.precision), Margins() as margins:
            self.model(ids.to(self.device), use_cache=False)
        return margins

    def row_gaps(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Per layer, how close each token [S] came to another selection, see `RowGaps`; ids are [1, S]."""
        per_layer: list[torch.Tensor] = []

        def collect(_module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
            gap = torch.full((ids.shape[1],), float("inf"))
            for call in gaps.calls:
                gap = torch.minimum(gap, call.float().cpu())
            gaps.calls.clear()
            per_layer.append(gap)

        handles = [layer.register_forward_hook(collect) for layer in self.model.model.layers]
        try:
            with torch.no_grad(), RowGaps() as gaps:
                self.model(ids.to(self.device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return per_layer

    def run(self, ids: torch.Tensor, *, gradients: bool) -> Trace:
        """Logits, streams after each layer and, if asked for, gradients of the next-token loss."""
        states: list[torch.Tensor] = []

        def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            states.append((output[0] if isinstance(output, tuple) else output).detach().cpu())

        handles = [layer.register_forward_hook(keep) for layer in self.model.model.layers]
        try:
            with running_in(self.precision), torch.set_grad_enabled(gradients):
                logits = self.model(ids.to(self.device), use_cache=False).logits
                trace = Trace(logits.detach().cpu(), states)
                if gradients:
                    self.model.zero_grad(set_to_none=True)
                    next_token_loss(logits, ids.to(self.device)).backward()
        finally:
            for handle in handles:
                handle.remove()
        if gradients:
            named = dict(self.model.named_parameters())
            grads = {n: (torch.zeros_like(p) if p.grad is None else p.grad) for n, p in named.items()}
            trace.grads = {n: g.cpu() for n, g in self.table.module_dialect.to_release(grads).items()}
        return trace


class Candidate:
    """The checkpoint as our Megatron model sees it."""

    def __init__(
        self,
        plugin: ModelPlugin,
        config: dict[str, object],
        directory: Path,
        precision: Precision,
        device: str,
    ) -> None:
        self.plugin, self.precision, self.device = plugin, precision, device
        self.table = plugin.rules(config)
        with running_in(precision):
            self.chunks = plugin.build(config, dtype=precision.dtype, device=device)
        self.load(directory)

    def load(self, directory: Path) -> None:
        """Fills every parameter and buffer from the checkpoint; what it does not fill stays NaN and shows.

        Outside the float64 mode: reading a file must see the dtypes that the file has.
        """
        with torch.no_grad():
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    parameter.fill_(float("nan"))
            load_checkpoint(self.chunks, CheckpointReader(directory), self.table)

    def run_pinned(self, ids: torch.Tensor, given: list[torch.Tensor]) -> Trace:
        """What each layer and the head make of given streams: layer i starts from those after layer i - 1."""
        states: dict[int, torch.Tensor] = {}

        def replace(layer: int, state: torch.Tensor) -> torch.Tensor:
            states[layer] = state.detach().cpu()
            return given[layer].to(state)

        handles = self.plugin.layer_states(self.chunks, replace)
        try:
            with torch.no_grad(), running_in(self.precision):
                logits = self.plugin.forward(self.chunks, ids.to(self.device))
        finally:
            for handle in handles:
                handle.remove()
        return Trace(logits.cpu(), [states[i] for i in sorted(states)])

    def run(self, ids: torch.Tensor, *, gradients: bool) -> Trace:
        """Logits, streams after each layer and, if asked for, gradients of the next-token loss."""
        states: dict[int, torch.Tensor] = {}

        def keep(layer: int, state: torch.Tensor) -> None:
            states[layer] = state.detach().cpu()

        handles = self.plugin.layer_states(self.chunks, keep)
        try:
            with running_in(self.precision), torch.set_grad_enabled(gradients):
                logits = self.plugin.forward(self.chunks, ids.to(self.device))
                trace = Trace(logits.detach().cpu(), [states[i] for i in sorted(states)])
                if gradients:
                    for chunk in self.chunks:
                        chunk.zero_grad(set_to_none=True)
                    next_token_loss(logits, ids.to(self.device)).backward()
        finally:
            for handle in handles:
                handle.remove()
        if gradients:
            trainable = {n for c in self.chunks for n, p in c.named_parameters() if p.grad is not None}
            if trainable:
                exported = export_tensors(self.chunks, self.table, value=lambda p: p.grad)
                trace.grads = {name: grad.detach().cpu() for name, grad in exported}
        return trace
