# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 on a CUDA device is the function that it is on the CPU: equal to transformers on the same device."""

from pathlib import Path

import pytest
import torch

from vime_convert.tiny import make_tiny
from vime_convert.verify.case import run_case
from vime_convert.verify.compare import relative

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("transformers", minversion="5.24", reason="the reference needs transformers >= 5.24")


@pytest.mark.parametrize("name", ["flash", "large-eps"])
def test_equal_to_transformers(name: str, tmp_path: Path) -> None:
    from vime_models.dsv4.plugin import PLUGIN

    PLUGIN.setup("cuda")
    case = next(case for case in PLUGIN.tiny_cases if case.name == name)
    make_tiny(case.config, tmp_path / "hf", seed=1, plugin=PLUGIN)
    precisions = ("float64", "float32", "bfloat16")
    result = run_case(
        PLUGIN, tmp_path / "hf", name=name, seq_len=case.seq_len, device="cuda", precisions=precisions
    )
    assert result.ok, [check for check in result.checks if not check.ok]


def test_the_fused_norm_rounds_once() -> None:
    from vime_models.host.norm import rms_norm

    torch.manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, device="cuda").bfloat16() for shape in ((300, 512), (512,), (300, 512))
    )
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        a, w = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
        out = rms_norm(a, w, 1e-6)
        out.backward(grad.to(dtype))
        results.append((out, a.grad, w.grad))
    for ours, exact in zip(*results, strict=True):
        assert relative(ours, exact) < 2.5e-3
    # Two roundings would move a tenth of the results to the neighbouring number.
    assert (results[0][0] == results[1][0].bfloat16()).float().mean() > 0.99


@pytest.mark.parametrize("wide_gradient", [False, True], ids=["compressor", "router"])
def test_wide_results_and_gradients(wide_gradient: bool) -> None:
    from vime_models.host.linear import wide_linear

    torch.manual_seed(0)
    x, weight = (torch.randn(n, 4096, device="cuda").bfloat16() for n in (300, 64))
    grad = torch.randn(300, 64, device="cuda")
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        a, w = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
        out = wide_linear(a, w, wide_gradient=wide_gradient)
        out.backward(grad.to(out.dtype))
        results.append((out, a.grad, w.grad))
    (out, *grads), (exact, *exact_grads) = results
    assert out.dtype is torch.float32
    assert relative(out, exact) < 1e-5, "bfloat16 would be at 2e-3"
    assert max(relative(g, e) for g, e in zip(grads, exact_grads, strict=True)) < 4e-3
    # A gradient that is rounded on its way moves half of the results to a neighbouring number.
    same = [(g == e.bfloat16()).float().mean().item() for g, e in zip(grads, exact_grads, strict=True)]
    assert all(share > 0.98 for share in same) is wide_gradient, same
