# SPDX-License-Identifier: Apache-2.0
"""Where the keys of a query row come from, as one object that the forward and the backward launchers share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KernelArguments:
    """A `Sources` as kernel arguments; absent tensors are replaced by a tensor that no kernel reads."""

    tensors: tuple[torch.Tensor, ...]  # kv_a, kv_b, starts_a, ends_a, starts_b, ends_b, indices, lengths
    n_a: int
    n_b: int
    K: int
    stride_a: int
    stride_b: int
    stride_is: int
    has_a: bool
    kind_b: str
    has_lengths: bool


@dataclass(frozen=True)
class Sources:
    """Band of source a: rows [starts_a, ends_a) of kv_a. Source b: picked rows, or a range of rows, of kv_b.

    Attributes:
        kv_a: [N, D] or None (no band).
        starts_a, ends_a: int32 [S].
        width_a: upper bound of ends_a - starts_a, known on the host.
        kv_b: [M, D] or None.
        indices: int32 [S, K] rows of kv_b, or None; outside [0, M) is no key.
        lengths: int32 [S], slots of `indices` from there on are ignored, or None.
        starts_b, ends_b: int32 [S] or None; used when `indices` is None.
        heads: of a query row, where `indices` and `lengths` are lists of groups of rows over both buffers
            (`triton_unite`); else 0.
    """

    kv_a: torch.Tensor | None = None
    starts_a: torch.Tensor | None = None
    ends_a: torch.Tensor | None = None
    width_a: int = 0
    kv_b: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    starts_b: torch.Tensor | None = None
    ends_b: torch.Tensor | None = None
    heads: int = 0

    @property
    def kind_b(self) -> str:
        """ "none", "picks", "range" or "united"."""
        if self.heads:
            return "united"
        if self.kv_b is None:
            return "none"
        return "picks" if self.indices is not None else "range"

    @property
    def slots_b(self) -> int:
        """Upper bound of the slots of source b, known on the host."""
        if self.kv_b is None:
            return 0
        return self.kv_b.shape[0] if self.indices is None else self.indices.shape[1]

    def rows(self, rows: slice) -> "Sources":
        """The same sources for a slice of the query rows."""

        def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[rows]

        return Sources(
            self.kv_a, cut(self.starts_a), cut(self.ends_a), self.width_a,
            self.kv_b, cut(self.indices), cut(self.lengths), cut(self.starts_b), cut(self.ends_b),
        )  # fmt: skip

    def kernel_arguments(self, q: torch.Tensor) -> KernelArguments:
        """These sources as kernel arguments."""
        dummy = host_or_dummy(q)
        tensors = (
            self.kv_a, self.kv_b, self.starts_a, self.ends_a, self.starts_b, self.ends_b, self.indices, self.lengths,
        )  # fmt: skip
        return KernelArguments(
            tensors=tuple(dummy(each) for each in tensors),
            n_a=0 if self.kv_a is None else self.kv_a.shape[0],
            n_b=0 if self.kv_b is None else self.kv_b.shape[0],
            K=0 if self.indices is None else self.indices.shape[1],
            stride_a=0 if self.kv_a is None else self.kv_a.stride(0),
            stride_b=0 if self.kv_b is None else self.kv_b.stride(0),
            stride_is=0 if self.indices is None else self.indices.stride(0),
            has_a=self.kv_a is not None and not self.heads,
            kind_b=self.kind_b,
            has_lengths=self.indices is not None and self.lengths is not None,
        )


def host_or_dummy(q: torch.Tensor) -> Callable[[torch.Tensor | None], torch.Tensor]:
    """Replaces None by q, for pointer arguments that a specialised kernel does not touch."""
    return lambda tensor: q if tensor is None else tensor
