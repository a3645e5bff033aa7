# SPDX-License-Identifier: Apache-2.0
"""The models whose shapes are measured, and inputs of any number of query rows for them."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Model:
    """The dimensions of one model's attention."""

    name: str
    heads: int
    d_v: int
    tail: int
    topk: int
    ratio: int
    window: int
    index_heads: int
    hidden: int


FLASH = Model("V4-Flash", 64, 512, 0, 512, 4, 128, 64, 4096)
PRO = Model("V4-Pro", 128, 512, 0, 1024, 4, 128, 64, 7168)
V32 = Model("V3.2", 128, 512, 64, 2048, 1, 0, 64, 7168)
GLM5 = Model("GLM-5", 64, 512, 64, 2048, 1, 0, 32, 6144)
GLM53 = Model("GLM-5.3", 64, 512, 0, 2112, 1, 0, 32, 4096)


@dataclass(frozen=True)
class Scale:
    """Where and how large: `tiny` shrinks every width, for the interpreter on a CPU."""

    device: str
    dtype: torch.dtype
    rows: int
    context: int
    tokens: int
    tiny: bool = False
    most: int = 2**30  # rows at most, where a case asks for another number

    def model(self, model: Model) -> Model:
        """The model's dimensions at this scale."""
        if not self.tiny:
            return model
        tail = 16 if model.tail else 0
        window = min(model.window, 4)
        return replace(model, heads=2, d_v=16, tail=tail, topk=4, window=window, index_heads=2, hidden=32)

    def at(self, context: int, rows: int = 4096) -> "Scale":
        """The same with another context, unless it is tiny; never more rows than context, or than `most`."""
        return self if self.tiny else replace(self, context=context, rows=min(rows, context, self.most))

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal values."""
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)

    def positions(self) -> torch.Tensor:
        """The last rows of the context: int32 [S]."""
        first = self.context - self.rows
        return torch.arange(first, self.context, device=self.device, dtype=torch.int32)


def picks(scale: Scale, n: int, ratio: int, k: int) -> torch.Tensor:
    """int32 [S, k]: groups of 16 neighbouring rows share most of their k best of random scores."""
    rows = []
    for at in scale.positions().split(512):
        base = torch.rand(len(at) // 16 + 1, n, device=scale.device).repeat_interleave(16, 0)[: len(at)]
        score = base + 0.4 * torch.rand(len(at), n, device=scale.device)
        visible = torch.arange(n, device=scale.device) < ((at + 1) // ratio)[:, None]
        best = score.masked_fill(~visible, float("-inf")).topk(min(k, n), 1)
        chosen = best.indices.masked_fill(best.values.isneginf(), n).sort(1).values
        chosen = torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=n)
        rows.append(chosen.masked_fill(chosen == n, -1).to(torch.int32))
    return torch.cat(rows)


def index_inputs(scale: Scale, model: Model) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Queries, keys and head weights of the indexer, and the causal range of every row."""
    dim = 16 if scale.tiny else 128
    n = scale.context // model.ratio
    weights = scale.randn(scale.rows, model.index_heads, dtype=torch.float32)
    leaves = [scale.randn(scale.rows, model.index_heads, dim), scale.randn(n, dim), weights]
    at = scale.positions()
    return leaves, torch.zeros_like(at), (at + 1) // model.ratio
