# SPDX-License-Identifier: Apache-2.0
"""Replay of picks for Megatron's own sparse attention (`--experimental-attention-variant dsa`): V3.2 and GLM models.

megatron-core 0.19.2 has no seam for it: an attention calls module functions that score and select. They are replaced
by functions that select natively and then put the recorded picks in place, wherever the attention of a registered
layer is running; so scores and the indexer's loss stay the host's. A fused kernel that selects and attends in one
declines while picks are replayed, which makes the host take its two-step path. Layers that reuse the picks of another
(`dsa_indexer_topk_freq`) own no stream and follow their source.

Under sequence parallelism the host's indexer gathers all rows. Where it then keeps those of its own tensor-parallel
rank (absorbed MLA with local queries), fill with a spec that has `shard_rows_by_tp`.
Left out: saving the time of the native selection.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.experimental_attention_variant import dsa, dsa_kernels

from vime_models.host.replay import Chunks, decoders

if TYPE_CHECKING:
    from vime_replay.manager import ReplayManager


def attach_dsa_replay(chunks: Chunks, manager: "ReplayManager") -> Callable[[], None]:
    """Every indexer of this rank records or replays with `manager` from now on; one manager per process.

    Args:
        chunks: the model chunks of this pipeline rank, in order.
        manager: whose spec has ratio 1; a disabled one changes nothing.

    Returns:
        A function that gives the host its own functions back.

    Raises:
        ValueError: a chunk that begins with a layer without an indexer: its source is on another stage.
    """
    if not manager.enabled:
        return lambda: None
    for number, decoder in decoders(chunks):
        attentions = [module for module in decoder.modules() if isinstance(module, dsa.DSAttention)]
        if attentions and attentions[0].skip_topk:
            raise ValueError(
                f"vime_models.host: expected chunk {number} to begin with a layer that owns an indexer, got layers "
                f"{[each.layer_number for each in attentions]}, the first of which reuses the picks of layer "
                f"{attentions[0].source_layer}; move the pipeline split"
            )
        for attention in attentions:
            if not attention.skip_topk:
                manager.register(attention, layer=attention.layer_number - 1, chunk=number)
    return _install(manager)


def _install(manager: "ReplayManager") -> Callable[[], None]:
    naive, fused = dsa.fused_qk_topk_naive, dsa_kernels.run_fused_qk_topk
    with_loss, whole = dsa_kernels.run_fused_qk_topk_with_loss, dsa_kernels.run_fused_dsa_attention

    def replaced(picks: torch.Tensor) -> torch.Tensor:
        """The recorded picks in place of the native ones [b, s, K]; records these when that is the stage."""
        rows = picks.new_empty(*picks.shape[:-1], 0)
        chosen: torch.Tensor = manager.wrap_topk(lambda _scores, _k: picks)(rows, picks.shape[-1])
        return chosen.to(picks.dtype)

    def select(*args: Any, **keywords: Any) -> Any:
        scores, picks = naive(*args, **keywords)
        return scores, replaced(picks)

    def select_fused(*args: Any, **keywords: Any) -> Any:
        found = fused(*args, **keywords)
        if found is None:
            return None
        picks, length = replaced(found[0]), found[1]
        return picks, None if length is None else (picks >= 0).sum(-1).to(length.dtype)

    def declining(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            busy = manager.running and manager.current_stage != "fallthrough"
            return None if busy else fn(*args, **keywords)

        return call

    def put(functions: Iterable[Any]) -> None:
        (
            dsa.fused_qk_topk_naive,
            dsa_kernels.run_fused_qk_topk,
            dsa_kernels.run_fused_qk_topk_with_loss,
            dsa_kernels.run_fused_dsa_attention,
        ) = functions

    put((select, select_fused, declining(with_loss), declining(whole)))
    return lambda: put((naive, fused, with_loss, whole))
