# SPDX-License-Identifier: Apache-2.0
"""The Triton backend of sparse attention as two custom operators, with gradients and shapes for torch.compile.

Chooses between the Hopper kernels (`gluon_fwd`; `fused_bwd` around `gluon_bwd_keys` and `gluon_bwd_wide`, for 512 and
512 + 64 channels; `gluon_bwd`: the gradient of the queries alone; `gluon_few`: both directions with at most 32 heads)
and the plain ones (`triton_fwd`, `triton_bwd`: every other width).
"""

from typing import Any

import torch

from vime_kernels.ops.sparse_attention import config, triton_bwd, triton_fwd
from vime_kernels.ops.sparse_attention.sources import Sources

Optional = torch.Tensor | None


def attend(
    q: torch.Tensor,
    sources: Sources,
    attn_sink: torch.Tensor | None,
    sm_scale: float,
    d_v: int,
    deterministic: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [S, H, d_v] in the dtype of q and lse float32 [S, H], with gradients to q, both kv and the sink."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    s = sources
    return sparse_attention_fwd(
        q, s.kv_a, s.starts_a, s.ends_a, s.width_a, s.kv_b, s.indices, s.lengths, s.starts_b, s.ends_b,
        attn_sink, sm_scale, d_v, deterministic,
    )  # fmt: skip


@torch.library.custom_op("vime_kernels::sparse_attention_fwd", mutates_args=())
def sparse_attention_fwd(
    q: torch.Tensor,
    kv_a: Optional,
    starts_a: Optional,
    ends_a: Optional,
    width_a: int,
    kv_b: Optional,
    indices: Optional,
    lengths: Optional,
    starts_b: Optional,
    ends_b: Optional,
    sink: Optional,
    scale: float,
    d_v: int,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward; the arguments are those of `Sources`, flattened."""
    sources = Sources(kv_a, starts_a, ends_a, width_a, kv_b, indices, lengths, starts_b, ends_b)
    sink = None if sink is None else sink.float()
    if config.hopper(q, kv_a, kv_b, d_v=d_v):
        group = _group(q, sources, deterministic)
        if group > 1:
            from vime_kernels.ops.sparse_attention import gluon_few

            return gluon_few.forward(q, sources, sink, scale, d_v, group)
        from vime_kernels.ops.sparse_attention import gluon_fwd

        return gluon_fwd.forward(q, sources, sink, scale, d_v)
    return triton_fwd.forward(q, sources, sink, scale, d_v)


@sparse_attention_fwd.register_fake
def _(
    q: torch.Tensor, kv_a: Optional, starts_a: Optional, ends_a: Optional, width_a: int, kv_b: Optional,
    indices: Optional, lengths: Optional, starts_b: Optional, ends_b: Optional, sink: Optional,
    scale: float, d_v: int, deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    S, H, _ = q.shape
    return q.new_empty((S, H, d_v)), q.new_empty((S, H), dtype=torch.float32)


@torch.library.custom_op("vime_kernels::sparse_attention_bwd", mutates_args=())
def sparse_attention_bwd(
    q: torch.Tensor,
    kv_a: Optional,
    starts_a: Optional,
    ends_a: Optional,
    width_a: int,
    kv_b: Optional,
    indices: Optional,
    lengths: Optional,
    starts_b: Optional,
    ends_b: Optional,
    sink: Optional,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: Optional,
    deterministic: bool,
    needs_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, kv_a, kv_b and the sink, each in the dtype of its tensor; empty where there is none to give."""
    sources = Sources(kv_a, starts_a, ends_a, width_a, kv_b, indices, lengths, starts_b, ends_b)
    dlse = None if dlse is None else dlse.contiguous()
    sink32 = None if sink is None else sink.float()
    hopper = config.hopper(q, kv_a, kv_b, d_v=out.shape[-1])
    if do.stride(-1) != 1 or (hopper and not config.hopper(q, do, d_v=out.shape[-1])):
        # A copy is aligned.
        do = do.clone(memory_format=torch.contiguous_format)
    group = _group(q, sources, deterministic)
    if hopper and needs_kv and group > 1:
        from vime_kernels.ops.sparse_attention import gluon_few

        grads = gluon_few.backward(q, sources, sink32, out, lse, do, dlse, scale, group)
    elif hopper and needs_kv:
        from vime_kernels.ops.sparse_attention import fused_bwd, gluon_bwd_keys, gluon_bwd_wide

        launch = (gluon_bwd_keys if q.shape[-1] == out.shape[-1] else gluon_bwd_wide).launch
        grads = fused_bwd.backward(
            launch, q, sources, sink32, out, lse, do, dlse, scale, deterministic=deterministic
        )
    elif hopper:
        from vime_kernels.ops.sparse_attention import gluon_bwd

        grads = gluon_bwd.backward(q, sources, sink32, out, lse, do, dlse, scale)
    else:
        grads = triton_bwd.backward(
            q, sources, sink32, out, lse, do, dlse, scale, needs_kv=needs_kv, deterministic=deterministic
        )
    dq, *others = grads
    outputs = [
        q.new_empty(0) if grad is None or like is None else grad.to(like.dtype)
        for grad, like in zip(others, (kv_a, kv_b, sink), strict=True)
    ]
    return dq, outputs[0], outputs[1], outputs[2]


@sparse_attention_bwd.register_fake
def _(
    q: torch.Tensor, kv_a: Optional, starts_a: Optional, ends_a: Optional, width_a: int, kv_b: Optional,
    indices: Optional, lengths: Optional, starts_b: Optional, ends_b: Optional, sink: Optional,
    scale: float, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: Optional,
    deterministic: bool, needs_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    def like(tensor: Optional, needed: bool) -> torch.Tensor:
        return q.new_empty(0) if tensor is None or not needed else tensor.new_empty(tensor.shape)

    return q.new_empty(q.shape), like(kv_a, needs_kv), like(kv_b, needs_kv), like(sink, True)


def _group(q: torch.Tensor, sources: Sources, deterministic: bool) -> int:
    """Query rows that share a program. Then their last bits depend on each other, which no repeatable call allows."""
    N = sum(len(kv) for kv in (sources.kv_a, sources.kv_b) if kv is not None)
    return 1 if deterministic else config.group_rows(q.shape[1], N)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, kv_a, starts_a, ends_a, width_a, kv_b, indices, lengths, starts_b, ends_b, sink, scale, _, det = inputs
    ctx.save_for_backward(
        q, kv_a, starts_a, ends_a, kv_b, indices, lengths, starts_b, ends_b, sink, output[0], output[1]
    )
    ctx.width_a, ctx.scale, ctx.deterministic = width_a, scale, det
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_out: Optional, d_lse: Optional) -> tuple[Optional, ...]:
    q, kv_a, starts_a, ends_a, kv_b, indices, lengths, starts_b, ends_b, sink, out, lse = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if d_out is None and d_lse is None:
        return (None,) * 14
    needs_kv = needs[1] or needs[5]
    dq, dkv_a, dkv_b, dsink = sparse_attention_bwd(
        q, kv_a, starts_a, ends_a, ctx.width_a, kv_b, indices, lengths, starts_b, ends_b, sink, ctx.scale,
        out, lse, torch.zeros_like(out) if d_out is None else d_out, d_lse, ctx.deterministic, needs_kv,
    )  # fmt: skip
    grads: list[Optional] = [None] * 14
    for place, grad in ((0, dq), (1, dkv_a), (5, dkv_b), (10, dsink)):
        grads[place] = grad if needs[place] else None
    return tuple(grads)


sparse_attention_fwd.register_autograd(_backward, setup_context=_save)
