# SPDX-License-Identifier: Apache-2.0
"""`--gradient-accumulation-fusion` for megatron-core's own linears where Apex is not installed.

The product that makes a weight's gradient also adds it to the float32 buffer of the optimizer: nothing is rounded to
bfloat16 in between, and nothing is read back. Megatron takes an extension of Apex for it; torch's addmm does the same.
TransformerEngine's linears bring their own and are not touched.
"""

import torch
from megatron.core.tensor_parallel import layers


class TorchWgrad:
    """What Megatron calls of Apex's extension."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        """main_grad += gradᵀ x, accumulated in float32.

        Args:
            x: [T, in].
            grad: [T, out], dtype of x.
            main_grad: [out, in], float32 or the dtype of x.
        """
        if x.dtype is main_grad.dtype:
            torch.addmm(main_grad, grad.t(), x, out=main_grad)
        else:
            torch.addmm(main_grad, grad.t(), x, out_dtype=main_grad.dtype, out=main_grad)

    # Of buffers in 16 bits: the same call.
    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def install(*, deferred: bool = False) -> None:
    """Lets linears be built with `gradient_accumulation_fusion`; with Apex, or a torch too old for it, does nothing.

    Args:
        deferred: whether the embedding's gradient is put off, which Megatron does with Apex alone.

    Raises:
        ValueError: put off without Apex; Megatron would notice at the end of the first step.
    """
    if layers._grad_accum_fusion_available and layers.fused_weight_gradient_mlp_cuda is not TorchWgrad:
        return
    if deferred:
        raise ValueError(
            "vime_models.host: --defer-embedding-wgrad-compute needs Apex's extension fused_weight_gradient_mlp_cuda, "
            "which is not installed; drop the flag or install Apex with --cuda_ext"
        )
    if "dtype_out" in torch.ops.aten.addmm.overloads():
        layers.fused_weight_gradient_mlp_cuda = TorchWgrad
        layers._grad_accum_fusion_available = True
