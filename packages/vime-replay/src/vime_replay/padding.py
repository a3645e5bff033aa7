# SPDX-License-Identifier: Apache-2.0
"""From packed rows to a microbatch that layers can ask for: in host memory, with rows without picks dealt with.

| class | rows | what happens |
| --- | --- | --- |
| E | see no key yet (the first tokens, with compressed keys) | stay empty |
| A, B, C | last token of a sample, padding of a sample, padding of the stream | `pad_policy` |
| D | a real row without a capture | computed anew |

An empty row is a softmax over nothing where the model has neither window nor sink, and NaN times zero reaches the
gradients of other rows. "recompute" selects these rows as the model would; "self" lets such a row see its own key,
which costs nothing and is causal; "empty" leaves them, for models whose window keeps the softmax finite.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from vime_replay.errors import ReplayConfigError
from vime_replay.layout import PackLayout
from vime_replay.memory import MicrobatchRows, host_rows
from vime_replay.pack import Order, PackedRows, pack_rows
from vime_replay.spec import ReplaySpec

PadPolicy = Literal["recompute", "self", "empty"]


def microbatch_packer(
    sources: Sequence[Any],
    spec: ReplaySpec,
    layout: PackLayout,
    streams: Sequence[int],
    *,
    policy: PadPolicy = "recompute",
    order: Order = "sorted",
    local: slice | None = None,
) -> tuple[tuple[int, int, int], Callable[[], MicrobatchRows]]:
    """The shape (L, S, K) of a microbatch's rows, and a function that packs them into host memory.

    Args:
        sources: rows of each sample; anything that `pack_rows` takes.
        spec: of the rows.
        layout: of the microbatch.
        streams: wire streams, in the order of the result.
        policy: see the module.
        order: of the picks of a row, as for `pack_rows`.
        local: part of this rank's rows, for a reader that sees only its share of them.
    """
    rows = len(range(*(local or slice(None)).indices(layout.local_rows)))
    shape = (len(streams), rows, spec.topk)

    def pack() -> MicrobatchRows:
        picks = host_rows(*shape)
        packed = pack_rows(
            sources, spec, layout, streams=streams, local=local, out=picks.numpy(), order=order
        )
        return pad_rows(packed, picks, policy)

    return shape, pack


def pad_rows(packed: PackedRows, picks_LSK: torch.Tensor, policy: PadPolicy = "recompute") -> MicrobatchRows:
    """A packed microbatch with its rows without picks dealt with.

    Args:
        packed: what `pack_rows` returned; with policy "self" its array is changed.
        picks_LSK: the tensor that `packed.picks_LSK` is a view of.
        policy: see the module.

    Raises:
        ReplayConfigError: real rows without a capture, and a policy that does not compute rows.
    """
    uncaptured = packed.empty_LS & (packed.available_S > 0)
    if policy != "recompute" and uncaptured.any():
        stream, row = (int(index[0]) for index in np.nonzero(uncaptured))
        raise ReplayConfigError(
            f"pad_policy {policy!r}: expected picks in every real row, got {int(uncaptured.any(0).sum())} rows "
            f"without, first local row {row} of stream {packed.streams[stream]}; use pad_policy 'recompute'"
        )
    redo: tuple[torch.Tensor, ...] = ()
    if policy == "recompute":
        wanted_LS = packed.empty_LS & (packed.available_S != 0)
        # Layers usually share these rows, and then the tensor.
        known: dict[bytes, torch.Tensor] = {}
        redo = tuple(
            known.setdefault(wanted.tobytes(), _pinned_like(picks_LSK, np.flatnonzero(wanted)))
            for wanted in wanted_LS
        )
    elif policy == "self":
        unrecorded = np.flatnonzero(packed.available_S < 0)
        packed.picks_LSK[:, unrecorded, 0] = own_keys(packed.layout, packed.spec.ratio)[unrecorded]
    return MicrobatchRows(picks_LSK, redo, _width(packed))


def own_keys(layout: PackLayout, ratio: int) -> npt.NDArray[np.int64]:
    """int64 [local_rows]: the newest key of its own segment that each row may see, -1 for none.

    The tail of the stream is a segment. Padding without keys of its own (compact key space) sees the last key of its
    sample, the tail the last key of all.
    """
    sample, position = layout.owners()
    compact = layout.key_space == "compact"
    extents = np.append(layout.lengths if compact else np.diff(layout.cu_seqlens), 0).astype(np.int64)
    keys = extents // ratio
    offsets = np.cumsum(keys) - keys
    if layout.key_space == "sample":
        offsets = np.zeros_like(offsets)
    segment = np.where(sample < 0, len(layout.lengths), sample)
    newest = np.minimum(position + 1, extents[segment]) // ratio - 1
    last = keys.sum() - 1 if compact else -1
    return np.where(newest >= 0, offsets[segment] + newest, np.where(sample < 0, last, -1))


def _pinned_like(rows: torch.Tensor, indices: npt.NDArray[np.int64]) -> torch.Tensor:
    tensor = torch.from_numpy(indices)
    return tensor.pin_memory() if rows.is_pinned() and len(tensor) else tensor


def _width(packed: PackedRows) -> int | None:
    """Columns that hold picks, from the number of keys; None for all, without looking."""
    spec = packed.spec
    width = max(1, packed.layout.total // spec.ratio) if spec.ratio else spec.topk
    # Picks of a row are distinct, ascending and fewer than keys, unless the caller kept another order.
    return None if width >= spec.topk or (packed.picks_LSK[:, :, width:] >= 0).any() else width
