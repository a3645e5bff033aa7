# SPDX-License-Identifier: Apache-2.0
"""The teacher of the indexer in Triton: attention mass of every pick, summed over heads on chip.

One program per query row, all heads at once. Given the denominator it walks the row's keys once; without it, twice.
With the denominator, widths 512 and 512 + 64 go to `gluon_target` on Hopper.
"""

import torch
import triton
import triton.language as tl

from vime_kernels._slots import fill_slots, used_slots
from vime_kernels.ops.indexer_loss import config
from vime_kernels.ops.sparse_attention.config import hopper

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    q_main, q_tail, key, indices_row, first, N, D, K, key_row, scale_log2,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Scaled products in base 2 of all heads with a tile of keys, -inf in slots without one; and which have one."""
    slot = first + tl.arange(0, BK)
    index = tl.load(indices_row + slot, mask=slot < K, other=-1)
    valid = (index >= 0) & (index < N)
    row = key + index.to(tl.int64)[:, None] * key_row
    d = tl.arange(0, MAIN)[None, :]
    k_main = tl.load(row + d, mask=valid[:, None] & (d < D), other=0.0)
    x_HK = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
    if TAIL:
        d = MAIN + tl.arange(0, TAIL)[None, :]
        k_tail = tl.load(row + d, mask=valid[:, None] & (d < D), other=0.0)
        x_HK = tl.dot(q_tail, tl.trans(k_tail), x_HK, input_precision="ieee")
    return tl.where(valid[None, :], x_HK * scale_log2, float("-inf")), slot


@triton.jit(do_not_specialize=["N"])
def _target_kernel(  # type: ignore[no-untyped-def]
    query, key, indices, lse, out, N, H, D, K, query_row, query_head, key_row, sm_scale,
    HAS_LSE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    indices += row * K
    out += row * K
    used = used_slots(indices, N, K)
    q_row = query + row * query_row + h[:, None].to(tl.int64) * query_head
    d = tl.arange(0, MAIN)[None, :]
    q_main = tl.load(q_row + d, mask=(h < H)[:, None] & (d < D), other=0.0)
    q_tail = q_main
    if TAIL:
        d = MAIN + tl.arange(0, TAIL)[None, :]
        q_tail = tl.load(q_row + d, mask=(h < H)[:, None] & (d < D), other=0.0)
    scale_log2 = sm_scale * LOG2E
    if HAS_LSE:
        lse_H = tl.load(lse + row * H + h, mask=h < H, other=0.0) * LOG2E
    else:
        top_H = tl.full([BH], -3.0e38, tl.float32)
        total_H = tl.zeros([BH], tl.float32)
        for first in tl.range(0, used, BK, num_stages=STAGES):
            x_HK, _ = _scores(
                q_main, q_tail, key, indices, first, N, D, K, key_row, scale_log2, MAIN, TAIL, BK
            )
            higher_H = tl.maximum(top_H, tl.max(x_HK, 1))
            total_H = total_H * tl.exp2(top_H - higher_H) + tl.sum(tl.exp2(x_HK - higher_H[:, None]), 1)
            top_H = higher_H
        lse_H = top_H + tl.log2(tl.where(total_H > 0, total_H, 1.0))
    lse_H = tl.where(h < H, lse_H, float("inf"))  # padded heads have no mass
    for first in tl.range(0, used, BK, num_stages=STAGES):
        x_HK, slot = _scores(
            q_main, q_tail, key, indices, first, N, D, K, key_row, scale_log2, MAIN, TAIL, BK
        )
        mass_HK = tl.where(x_HK > float("-inf"), tl.exp2(x_HK - lse_H[:, None]), 0.0)
        tl.store(out + slot, tl.sum(mass_HK, 0), mask=slot < K)
    fill_slots(out, tl.cdiv(used, BK) * BK, K, 0.0)


@torch.library.custom_op("vime_kernels::indexer_kl_target", mutates_args=())
def indexer_kl_target(
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    lse: torch.Tensor | None,
    sm_scale: float,
) -> torch.Tensor:
    """float32 [S, K]. Arguments as in `interface.indexer_kl_target`, already checked; indices and lse contiguous."""
    (S, H, D), (N, _), K = query.shape, key.shape, indices.shape[1]
    out = torch.empty(S, K, dtype=torch.float32, device=query.device)
    if 0 in (S, H, N, K):
        return out.zero_()
    if lse is not None and hopper(query, key, d_v=512):
        from vime_kernels.ops.indexer_loss import gluon_target

        gluon_target.indexer_kl_target(query, key, indices, lse, sm_scale, out)
        return out
    main = max(16, 1 << (D.bit_length() - 1))
    heads = max(16, triton.next_power_of_2(H))
    tile = config.target_tile(heads, D)
    _target_kernel[(S,)](
        query, key, indices, lse, out, N, H, D, K, query.stride(0), query.stride(1), key.stride(0), sm_scale,
        HAS_LSE=lse is not None, MAIN=main, TAIL=max(16, triton.next_power_of_2(D - main)) if main < D else 0,
        BH=heads, BK=tile.slots, STAGES=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip
    return out


@indexer_kl_target.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    lse: torch.Tensor | None,
    sm_scale: float,
) -> torch.Tensor:
    return query.new_empty(indices.shape, dtype=torch.float32)
