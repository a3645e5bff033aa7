# SPDX-License-Identifier: Apache-2.0
"""Lightning indexer: which compressed entries a query attends to in a ratio-4 layer.

The selection is discrete, so no gradient reaches the indexer from the language-model loss; its parameters are
frozen, because weight decay alone would move them away from the rollout engine's copy, unless `train_indexer` adds
a loss of its own. Source: DeepSeek-V4 technical report, eqs. 13-17.
"""

from collections.abc import Callable

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_kernels.dsa import get_topk_fn, indexer_logits, indexer_topk
from vime_models.dsv4.compressor import Compressor
from vime_models.dsv4.context_parallel import ContextParallel
from vime_models.dsv4.qat import quantise_indexer
from vime_models.dsv4.rope import RotaryTable, rotate
from vime_models.dsv4.thd import TokenLayout
from vime_models.host.backend import Backend


class Indexer(MegatronModule):
    """Scores compressed entries with a few cheap heads and keeps the best.

    Args:
        config: with `vime_dsv4`, and with `sequence_parallel` off.
        cp: of the attention.

    Attributes:
        topk_fn: picks from scores. Signature of `vime_kernels.dsa.topk`.
        replay: gives the picks of all rows, or asks for those that it does not have; see `dsv4.replay`. None: every
            row is selected here.
        last_loss: the indexer's loss of the last microbatch with gradients, for logs; None if it is not trained.
    """

    last_loss: torch.Tensor | None = None
    replay: Callable[..., torch.Tensor] | None = None

    def __init__(self, config: TransformerConfig, cp: ContextParallel) -> None:
        super().__init__(config)
        self.cp = cp
        options = config.vime_dsv4
        self.n_heads, self.head_dim, self.topk = (
            options.index_n_heads,
            options.index_head_dim,
            options.index_topk,
        )
        self.topk_fn = get_topk_fn("canonical", backend=options.backend)
        linear = Backend.from_config(config).replicated_linear
        self.linear_wq_b = linear(
            options.q_lora_rank,
            self.n_heads * self.head_dim,
            config=config,
            init_method=config.init_method,
            bias=False,
        )
        self.linear_weights_proj = linear(
            config.hidden_size, self.n_heads, config=config, init_method=config.init_method, bias=False
        )
        self.compressor = Compressor(config, ratio=4, width=self.head_dim)
        self.requires_grad_(options.train_indexer != "off")

    def project(
        self, hidden: torch.Tensor, q_lora: torch.Tensor, layout: TokenLayout, table: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What scores are made of: queries [T, heads, width], this rank's keys and head weights [T, heads].

        Args: as for `select`.
        """
        queries = self._queries(q_lora, layout.rotation(table, q_lora.dtype))
        return queries, self._keys(hidden, layout, table), self._weights(hidden, layout)

    def _queries(self, q_lora: torch.Tensor, rotation: tuple[torch.Tensor, ...]) -> torch.Tensor:
        queries = self.linear_wq_b(q_lora)[0].view(-1, self.n_heads, self.head_dim)
        options = self.config.vime_dsv4
        return quantise_indexer(rotate(queries, *rotation, backend=options.backend), options)

    def _keys(self, hidden: torch.Tensor, layout: TokenLayout, table: RotaryTable) -> torch.Tensor:
        return quantise_indexer(self.compressor(hidden, layout, table), self.config.vime_dsv4)

    def _weights(self, hidden: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        weights = self.linear_weights_proj(layout.own(hidden))[0]
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return weights * (self.n_heads * self.head_dim) ** -0.5

    @torch.no_grad()
    def select(
        self, hidden: torch.Tensor, q_lora: torch.Tensor, layout: TokenLayout, table: RotaryTable
    ) -> torch.Tensor:
        """int32 [T, K] entries for each token, -1 where fewer than K are visible; they count all sequences.

        Rows are in the order of `ContextParallel.queries`.

        Args:
            hidden: [N, h], the normalised input of the attention, with the halo of each slice.
            q_lora: [T, q_lora_rank], the normalised low-rank query that the attention also uses.
            layout: of the T tokens.
            table: rotation of the layer.
        """
        ratio, order = self.compressor.ratio, self.cp.queries(layout)
        backend = self.config.vime_dsv4.backend
        # What `select` has communicated, for `scores` after it.
        seen: dict[str, tuple[torch.Tensor, ...]] = {}

        def scored(
            rows: torch.Tensor | None,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            """Queries, keys, weights, starts and ends, from which scores are made."""
            low_rank, cos, sin, weights, first, end = (
                each if rows is None else each[rows] for each in seen["rows"]
            )
            return self._queries(low_rank, (cos, sin)), seen["keys"][0], weights, first, end

        def select(rows: torch.Tensor | None, width: int | None) -> torch.Tensor:
            """Picks of all rows, or of the given ones; every rank communicates, whether it was given rows or not."""
            keys = self.cp.gather_entries(self._keys(hidden, layout, table), layout, ratio)
            seen["keys"] = (keys,)
            seen["rows"] = (
                self.cp.balance(q_lora, layout),
                *order.rotation(table, q_lora.dtype),
                self.cp.balance(self._weights(hidden, layout), layout),
                *order.visible(ratio),
            )
            return indexer_topk(
                *scored(rows),
                width or max(1, min(self.topk, keys.shape[0])),
                topk_fn=self.topk_fn,
                backend=backend,
            )

        def scores(rows: torch.Tensor) -> torch.Tensor:
            return indexer_logits(*scored(rows), backend=backend)

        if self.replay is None:
            return select(None, None)
        rows, ticket = len(order.rows), layout.replay_ticket
        return self.replay(select, rows=rows, ticket=ticket, device=hidden.device, scores=scores)
