# SPDX-License-Identifier: Apache-2.0
"""Where replays of picks find the layers of a built model, and replay of expert routes for Megatron's routers."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vime_replay.routing import RoutingReplayManager

Chunks = torch.nn.Module | Iterable[torch.nn.Module]


def decoders(chunks: Chunks) -> Iterator[tuple[int, Any]]:
    """Number and decoder of each model chunk of this pipeline rank; draft layers are outside of it.

    Args:
        chunks: one chunk, or all in order; wrapped (DDP, Float16Module) or not.
    """
    for number, chunk in enumerate([chunks] if isinstance(chunks, torch.nn.Module) else chunks):
        inner: Any = chunk
        while not hasattr(inner, "decoder"):
            inner = inner.module
        yield number, inner.decoder


def attach_router_replay(chunks: Chunks, manager: "RoutingReplayManager") -> None:
    """Routers of the layers that have a stream record or replay with `manager` from now on.

    Args:
        chunks: as for `decoders`.
        manager: a disabled one changes nothing.
    """
    for number, decoder in decoders(chunks):
        for layer in decoder.layers:
            if layer.layer_number - 1 in manager.spec.stream_of_layer:
                manager.attach(layer, layer.mlp.router, layer=layer.layer_number - 1, chunk=number)
