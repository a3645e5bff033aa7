# SPDX-License-Identifier: Apache-2.0
"""On a GPU the gradient of a weight reaches the float32 buffer without having been rounded."""

import pytest
import torch

from vime_models.host.gradient_fusion import TorchWgrad


@pytest.mark.gpu
def test_sums_of_bfloat16_products_are_not_rounded_on_the_way() -> None:
    x, grad = (torch.randn(512, n, device="cuda").bfloat16() for n in (256, 384))
    main_grad = torch.randn(384, 256, device="cuda")
    expected = main_grad.double() + grad.double().t() @ x.double()
    TorchWgrad.wgrad_gemm_accum_fp32(x, grad, main_grad)
    error = (main_grad.double() - expected).norm() / expected.norm()
    assert error < 1e-5, "a bfloat16 gradient would be at 2e-3"
