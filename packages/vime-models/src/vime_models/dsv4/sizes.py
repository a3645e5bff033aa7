# SPDX-License-Identifier: Apache-2.0
"""How large the parts of a DeepSeek-V4 model are: parameters, what a layer keeps for its backward pass, what it sends.

Data for `vime_models.plan`, derived from the config alone; formulas and limits are in docs/scaling.md. Counts of
parameters are exact. Activations are what this package's modules keep when each op of vime-kernels keeps its inputs
and output; the torch reference of those ops keeps more. Importable without torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vime_convert.dsv4.hf_config import DSv4HFConfig, read_config

__all__ = ["Kept", "Message", "Weight", "read_config"]

# What divides a quantity among ranks: nothing, tensor parallelism (heads, channels or vocabulary), the sequence shards
# of tensor parallelism, or the routed experts.
Split = Literal["", "tp", "sp", "ep"]


@dataclass(frozen=True)
class Weight:
    """A group of parameters.

    Attributes:
        name: what it is.
        elements: of the whole model.
        split: what divides it.
        fp32: kept in float32 under bfloat16 training.
        trained: has gradients and optimizer state by default.
    """

    name: str
    elements: int
    split: Split = ""
    fp32: bool = False
    trained: bool = True


@dataclass(frozen=True)
class Kept:
    """Activations per token that one layer keeps: bytes, and what divides them."""

    name: str
    bytes: float
    split: Split
    moe: bool = False


@dataclass(frozen=True)
class Message:
    """Traffic per token of one layer: payload bytes of a collective, forward and backward.

    Attributes:
        name: what is sent.
        group: "tp", "ep" or "cp".
        forward, backward: payload per token in bytes, times 2 for an all-reduce; a rank sends (size - 1) / size of it.
        split: what divides the tokens.
        moe: whether it is inside the MoE sub-block.
    """

    name: str
    group: Literal["tp", "ep", "cp"]
    forward: float
    backward: float
    split: Split = ""
    moe: bool = False


def same_layer(hf: DSv4HFConfig, layer: int) -> int:
    """The first layer of the same size."""
    return hf.compress_ratios.index(hf.compress_ratios[layer])


def layer_weights(hf: DSv4HFConfig, layer: int) -> Iterator[Weight]:
    """Parameters of a decoder layer, 0-based."""
    D, d, n, ratio = hf.hidden_size, hf.head_dim, hf.hc_mult, hf.compress_ratios[layer]
    low_rank = hf.o_groups * hf.o_lora_rank
    yield Weight("query and key projections", (hf.q_lora_rank + d) * D)
    yield Weight("wq_b", hf.num_heads * d * hf.q_lora_rank, "tp")
    yield Weight("wo_a", hf.o_lora_rank * hf.num_heads * d, "tp")
    yield Weight("wo_b", D * low_rank, "tp")
    yield Weight("sinks", hf.num_heads, "tp", fp32=True)
    yield Weight("norms", 2 * D + hf.q_lora_rank + d)
    mixes = (2 + n) * n
    yield Weight("hyper-connections", 2 * (mixes * n * D + mixes + 3), fp32=True)
    if ratio:
        yield from _compressor("compressor", ratio, d, D, trained=True)
    if ratio == 4:
        width = hf.index_head_dim
        yield Weight("indexer", hf.index_n_heads * (width * hf.q_lora_rank + D), trained=False)
        yield from _compressor("indexer's compressor", ratio, width, D, trained=False)
    yield Weight("router", hf.num_experts * D)
    yield Weight("shared expert", 3 * hf.moe_intermediate_size * D, "tp")
    yield Weight("routed experts", hf.num_experts * 3 * hf.moe_intermediate_size * D, "ep")


def _compressor(name: str, ratio: int, width: int, D: int, *, trained: bool) -> Iterator[Weight]:
    channels = width * (2 if ratio == 4 else 1)
    yield Weight(name, 2 * channels * D + width, trained=trained)
    yield Weight(f"{name}, positions", ratio * channels, fp32=True, trained=trained)


def embedding_weights(hf: DSv4HFConfig) -> Iterator[Weight]:
    """Parameters of the first stage outside its layers."""
    yield Weight("embedding", hf.vocab_size * hf.hidden_size, "tp")


def head_weights(hf: DSv4HFConfig) -> Iterator[Weight]:
    """Parameters of the last stage outside its layers."""
    D, n = hf.hidden_size, hf.hc_mult
    yield Weight("output layer", hf.vocab_size * D, "tp")
    yield Weight("final norm", D)
    yield Weight("stream head", n * n * D + n + 1, fp32=True)


def layer_kept(hf: DSv4HFConfig, layer: int, width: int) -> Iterator[Kept]:
    """Activations of a layer per token, for `width` bytes per activation (2 in bfloat16)."""
    D, d, n, ratio = hf.hidden_size, hf.head_dim, hf.hc_mult, hf.compress_ratios[layer]
    heads, R, K, F = hf.num_heads * d, hf.q_lora_rank, hf.experts_per_token, hf.moe_intermediate_size
    mixes = (2 + n) * n * 4
    yield Kept("attention: streams, its input and output", (n + 2) * D * width + mixes, "sp")
    yield Kept("attention: gathered input", D * width, "")
    yield Kept("attention: low-rank query, keys", (2 * R + 2 * d) * width, "")
    yield Kept("attention: queries, outputs", 4 * heads * width + hf.num_heads * 4, "tp")
    yield Kept("attention: low-rank output", hf.o_groups * hf.o_lora_rank * width, "tp")
    if ratio:
        channels = d * (2 if ratio == 4 else 1)
        # Both projections come out in float32.
        yield Kept("compressor", 2 * channels * 4 + d * (4 + 2 * width) / ratio, "")
    if ratio == 4:
        yield Kept("picks", hf.index_topk * 4, "")
    yield Kept("MoE: streams, its input and output", (n + 2) * D * width + mixes, "sp")
    yield Kept("MoE: normed input", D * width, "sp", moe=True)
    yield Kept("MoE: scores", 5 * hf.num_experts * 4, "sp", moe=True)
    yield Kept("MoE: routed experts", K * (D + 3 * F) * width, "ep", moe=True)
    yield Kept("MoE: shared expert", 3 * F * width, "tp", moe=True)


def layer_messages(hf: DSv4HFConfig, layer: int, width: int, *, etp: int) -> Iterator[Message]:
    """Traffic of a layer, for `width` bytes per activation."""
    D, d, ratio = hf.hidden_size, hf.head_dim, hf.compress_ratios[layer]
    hidden, entries = D * width, d * width / ratio if ratio else 0.0
    yield Message("attention: gather input, sum output", "tp", 3 * hidden, hidden)
    shared = 2 * (hf.q_lora_rank + d) * width + 2 * entries
    yield Message("attention: gradients of what all heads share", "tp", 0, shared)
    yield Message("shared expert: gather and scatter", "tp", 2 * hidden, 3 * hidden, moe=True)
    routed = 2 * hf.experts_per_token * hidden
    yield Message("experts: dispatch and combine", "ep", routed, routed, "sp", moe=True)
    if etp > 1:
        yield Message("experts: gather and scatter", "tp", routed, routed, "sp", moe=True)
    keys = entries + (hf.index_head_dim * width / ratio if ratio == 4 else 0.0)
    # Every rank receives the entries of all; their gradients come back in float32.
    yield Message("compressed keys of all ranks", "cp", keys, d * 4 / ratio if ratio else 0.0)
    yield Message("zigzag rows to contiguous and back", "cp", 2 * hidden, 2 * hidden)


def flops_per_token(hf: DSv4HFConfig) -> float:
    """Multiply-adds times 2 of one token's matrix products with weights, forward."""
    weights = [w for layer in range(hf.num_layers) for w in layer_weights(hf, layer)] + list(head_weights(hf))
    active = hf.experts_per_token / hf.num_experts
    return 2.0 * sum(w.elements * (active if w.split == "ep" else 1.0) for w in weights)


def attention_flops(hf: DSv4HFConfig, layer: int, length: int) -> float:
    """Multiply-adds times 2 of a layer's attention over one sequence, forward: scores and values of what its queries
    see, and the indexer's scores of all visible entries.
    """
    ratio, window, K = hf.compress_ratios[layer], hf.window, hf.index_topk
    keys = _sum_of_min(length, 1, window)
    entries = _sum_of_min(length, ratio, length) if ratio else 0
    selected = _sum_of_min(length, ratio, K) if ratio == 4 else entries
    scored = entries if ratio == 4 else 0
    return (
        4.0 * hf.num_heads * hf.head_dim * (keys + selected)
        + 2.0 * hf.index_n_heads * hf.index_head_dim * scored
    )


def forward_flops(hf: DSv4HFConfig, lengths: Sequence[int]) -> float:
    """Of all layers and the head over packed sequences."""
    attention = sum(attention_flops(hf, layer, n) for layer in range(hf.num_layers) for n in lengths)
    return flops_per_token(hf) * sum(lengths) + attention


def _sum_of_min(length: int, ratio: int, most: int) -> int:
    """Sum of min(most, p // ratio) for p = 1 … length."""
    full = min(most, length // ratio)
    # Below the bound, `ratio` positions share each count; the first group counts 0.
    below = ratio * full * (full - 1) // 2
    return below + full * (length - ratio * full + 1)
