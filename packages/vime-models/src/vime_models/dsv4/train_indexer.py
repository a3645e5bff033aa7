# SPDX-License-Identifier: Apache-2.0
"""Training the lightning indexer: its scores learn to rank compressed entries as the attention weighs them.

    teacher[t, g] = Σ_h exp(<q[t, h], entry[g]> / √d - lse[t, h])     lse over window, entries and sink
    loss          = coeff · mean over t of KL(teacher normalised over g ‖ softmax over g of scores[t, g])

The teacher is a constant and the student sees detached activations, so this loss moves the indexer and nothing
else, and the language-model loss moves everything else. `joint` compares on the chosen entries. `warmup` is for an
indexer that does not choose well yet: attention is over all visible entries, so is the comparison, and every other
parameter is frozen; both cost memory and time that grow with the square of the length.
Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1; the denominator of V4 as in Megatron-LM.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from vime_kernels.dsa import indexer_kl_loss, indexer_kl_target, indexer_scores
from vime_models.dsv4.thd import TokenLayout

if TYPE_CHECKING:
    from vime_models.dsv4.attention import DSv4Attention


def freeze_all_but_indexers(model: torch.nn.Module) -> None:
    """Leaves gradients to the indexers' parameters only. Call it after building and before wrapping the model."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in f".{name}")

    def require_grad(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        # Reentrant checkpointing of a layer records gradients only if an input asks for one.
        return output.requires_grad_() if torch.is_grad_enabled() else output

    if (embedding := getattr(model, "embedding", None)) is not None:
        embedding.register_forward_hook(require_grad)


def with_indexer_loss(
    attention: "DSv4Attention",
    attended_SHD: torch.Tensor,
    lse_SH: torch.Tensor,
    q_SHD: torch.Tensor,
    entries_MD: torch.Tensor,
    indices_SK: torch.Tensor | None,
    key_x: torch.Tensor,
    q_lora: torch.Tensor,
    layout: TokenLayout,
) -> torch.Tensor:
    """`attended_SHD`, unchanged; its backward pass also runs that of the indexer's loss.

    Megatron scales the loss as it scales those of its MoE layers: by the loss scale, over microbatches and over
    context-parallel ranks. With `calculate_per_token_loss` it is the sum over tokens and not the mean.

    Args:
        attention: a ratio-4 layer whose indexer is trained.
        attended_SHD: output of the attention core, in the order of `ContextParallel.queries`.
        lse_SH: its logarithm of the denominator, without the sink.
        q_SHD: queries of this rank's heads, in the same order.
        entries_MD: compressed entries of the whole stream.
        indices_SK: int32 entries that each query attended to, -1 for none; None for all visible ones.
        key_x: the attention's input with the halo of each slice, [N, h].
        q_lora: [T, q_lora_rank], in contiguous order.
        layout: of the T tokens.

    Raises:
        RuntimeError: warm-up with a model whose other parameters are not frozen.
    """
    indexer, cp, config = attention.indexer, attention.cp, attention.config
    options = config.vime_dsv4
    if options.train_indexer == "warmup" and attention.wq_a.weight.requires_grad:
        raise RuntimeError(
            "vime_models.dsv4: --dsv4-train-indexer warmup trains nothing but the indexer, yet other parameters have "
            "gradients; call train_indexer.freeze_all_but_indexers(model) before the optimizer is built"
        )
    if indices_SK is None:
        indices_SK = visible_entries(*cp.queries(layout).visible(4), len(entries_MD))
    target_SK = indexer_kl_target(
        q_SHD.detach(),
        entries_MD.detach(),
        indices_SK,
        attention.head_dim**-0.5,
        lse=torch.logaddexp(lse_SH.detach(), attention.attn_sink.detach()),
        backend=options.backend,
    )
    if attention.tp_group.size() > 1:
        # Heads are sharded; the loss is then the same number on every rank, and so are its gradients.
        dist.all_reduce(target_SK, group=attention.tp_group)
    queries, own_keys, weights = indexer.project(key_x.detach(), q_lora.detach(), layout, attention.rope)
    scores_SK = indexer_scores(
        cp.balance(queries, layout),
        cp.gather_entries(own_keys, layout, 4),
        cp.balance(weights, layout),
        indices_SK,
        backend=options.backend,
    )
    real_S = cp.queries(layout).real_rows
    loss = indexer_kl_loss(
        scores_SK,
        target_SK,
        indices_SK,
        coeff=options.indexer_loss_coeff,
        row_mask=real_S,
        reduction="sum",
        backend=options.backend,
    )
    if not config.calculate_per_token_loss:
        counts = (indices_SK >= 0).any(-1)
        counted = (counts if real_S is None else counts & real_S).sum()
        if cp.group.size() > 1:
            dist.all_reduce(counted, group=cp.group)
        loss = loss / counted.clamp_min(1)
    indexer.last_loss = loss.detach()
    return cast(torch.Tensor, MoEAuxLossAutoScaler.apply(attended_SHD, loss))


def visible_entries(starts_S: torch.Tensor, ends_S: torch.Tensor, entries: int) -> torch.Tensor:
    """int32 [S, entries]: every entry in [starts, ends) in its own column, -1 elsewhere."""
    columns = torch.arange(entries, dtype=torch.int32, device=starts_S.device)
    inside = (columns >= starts_S[:, None]) & (columns < ends_S[:, None])
    return torch.where(inside, columns, -1)
