# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections (mHC): n residual streams in place of one.

A sub-block F (attention or MoE) reads a mixture of the streams and writes back to all of them; the streams also
mix among themselves by a doubly stochastic matrix. All mixing weights depend on the token. There is no other
residual connection. The arithmetic is in `vime_kernels.mhc`; here are the parameters and the wiring.
Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2026.
"""

from collections.abc import Callable

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_kernels.mhc import mhc_mixes, mhc_post, mhc_pre
from vime_models.host.dtypes import mark_fp32


def fp32_parameter(config: TransformerConfig, *shape: int, sequence_shard: bool) -> torch.nn.Parameter:
    """A zero parameter that stays float32 under bfloat16 training (float64 in a float64 model).

    Args:
        config: parameter dtype, initialisation device and sequence parallelism.
        *shape: shape of the parameter.
        sequence_shard: whether the parameter acts on a shard of the sequence under sequence parallelism, so that
            its gradient is a partial sum over tensor-parallel ranks.
    """
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    dtype = torch.promote_types(config.params_dtype, torch.float32)
    parameter = torch.nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device))
    parameter.sequence_parallel = sequence_shard and config.sequence_parallel  # type: ignore[attr-defined]
    mark_fp32(parameter)
    return parameter


def add_hyper_connection(module: torch.nn.Module, prefix: str, config: TransformerConfig) -> None:
    """Registers `{prefix}_{fn,base,scale}` on a module: the weights of one sub-block's mixing.

    Args:
        module: receives fn [(2+n)n, n·h], base [(2+n)n] and scale [3], in the order pre, post, comb.
        prefix: "hc_attn" or "hc_ffn", as in the checkpoint.
        config: with `vime_dsv4`.
    """
    streams = config.vime_dsv4.hc_mult
    mixes = (2 + streams) * streams
    fn = fp32_parameter(config, mixes, streams * config.hidden_size, sequence_shard=True)
    scale = fp32_parameter(config, 3, sequence_shard=True)
    if config.perform_initialization:
        config.init_method(fn)
        torch.nn.init.ones_(scale)
    module.register_parameter(f"{prefix}_fn", fn)
    module.register_parameter(f"{prefix}_base", fp32_parameter(config, mixes, sequence_shard=True))
    module.register_parameter(f"{prefix}_scale", scale)


def connect(
    module: MegatronModule,
    prefix: str,
    X_TnC: torch.Tensor,
    block: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The streams [T, n, h] after one sub-block.

    Args:
        module: owner of the parameters that `add_hyper_connection` registered, with its `config`.
        prefix: which ones.
        X_TnC: streams [T, n, h].
        block: maps [T, h] to [T, h]; includes its own input norm.
    """
    config = module.config
    options = config.vime_dsv4
    pre_Tn, post_Tn, comb_Tnn = mhc_mixes(
        X_TnC,
        getattr(module, f"{prefix}_fn"),
        getattr(module, f"{prefix}_scale"),
        getattr(module, f"{prefix}_base"),
        eps=options.hc_eps,
        iters=options.hc_sinkhorn_iters,
        norm_eps=config.layernorm_epsilon,
        backend=options.backend,
    )
    hidden = block(mhc_pre(X_TnC, pre_Tn, backend=options.backend))
    return mhc_post(hidden, X_TnC, post_Tn, comb_Tnn, backend=options.backend)
