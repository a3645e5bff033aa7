# SPDX-License-Identifier: Apache-2.0
"""Two processes: attention over zigzag context parallelism, and a sequence-parallel norm and linear."""

import json
import os
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from vime_models.host import bringup  # noqa: E402
from vime_models.host.attention import EagerCoreAttention, eager_attention, zigzag_rows  # noqa: E402
from vime_models.host.cpu import cpu_overrides  # noqa: E402

S, H, G, D = 24, 4, 2, 8


def _context_parallel(cu_seqlens: list[int], packed: bool) -> float:
    """Largest difference of output and gradients between two ranks and the whole sequences on one."""
    cu = torch.tensor(cu_seqlens)
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(S, 1, heads, D, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (H, G, G)
    ]
    weights = torch.randn(S, H * D, generator=generator, dtype=torch.float64)
    rows = torch.arange(S)
    sequence = torch.bucketize(rows, cu[1:], right=True)
    visible = (rows[None] <= rows[:, None]) & (sequence[None] == sequence[:, None])
    expected = eager_attention(*whole, visible, D**-0.5).flatten(-2).squeeze(1)
    (expected * weights).sum().backward()

    config = TransformerConfig(
        **cpu_overrides(
            {
                "num_layers": 1,
                "hidden_size": H * D,
                "num_attention_heads": H,
                "attention_dropout": 0.0,
                "context_parallel_size": 2,
                "params_dtype": torch.float64,
            }
        )
    )
    core = EagerCoreAttention(config, 1, AttnMaskType.causal, "self")
    mine = zigzag_rows(cu, 2, parallel_state.get_context_parallel_rank())
    local = [t.detach()[mine].requires_grad_() for t in whole]
    if packed:
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu)
        out = core(*(t.squeeze(1) for t in local), packed_seq_params=params)
    else:
        out = core(*local).squeeze(1)
    (out * weights[mine]).sum().backward()
    errors = [(out - expected[mine]).abs().max()]
    errors += [(a.grad - b.grad[mine]).abs().max() for a, b in zip(local, whole, strict=True)]
    return max(error.item() for error in errors)


def main() -> None:
    bringup.init_world(cp=2)
    out = {"unpacked": _context_parallel([0, S], False), "packed": _context_parallel([0, 8, S], True)}
    bringup.init_world(tp=2)
    out["replaced"] = parallel_state.get_tensor_model_parallel_world_size()
    out["cp"] = parallel_state.get_context_parallel_world_size()
    if os.environ["RANK"] == "0":
        print(json.dumps(out))
    bringup.destroy_world()


if __name__ == "__main__":
    main()
