# SPDX-License-Identifier: Apache-2.0
"""Products of all experts of a rank, against one product at a time."""

import pytest
import torch
from megatron.core.tensor_parallel import layers

from vime_models.dsv4.experts import expert_products
from vime_models.host import gradient_fusion

COUNTS = [3, 0, 5, 1]  # two rows more follow
ROWS, INPUTS, OUTPUTS = sum(COUNTS) + 2, 6, 4


@pytest.fixture
def operands() -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Rows, weights, and a gradient of the products."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, INPUTS), *[(OUTPUTS, INPUTS)] * len(COUNTS), (sum(COUNTS), OUTPUTS)]
    rows, *weights, grad = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return rows.requires_grad_(), [torch.nn.Parameter(w) for w in weights], grad


def test_values_and_gradients_are_those_of_single_products(operands) -> None:
    rows, weights, grad = operands
    ours = expert_products(rows, COUNTS, weights)
    parts = rows[: sum(COUNTS)].split(COUNTS)
    theirs = torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])
    assert ours.equal(theirs)
    for mine, other in zip(
        *(torch.autograd.grad(o, [rows, *weights], grad) for o in (ours, theirs)), strict=True
    ):
        assert mine.equal(other)


def test_a_weight_that_is_not_trained_gets_no_gradient(operands) -> None:
    rows, weights, grad = operands
    weights[2].requires_grad_(False)
    expert_products(rows.detach(), COUNTS, weights).backward(grad)
    assert [weight.grad is not None for weight in weights] == [True, True, False, True]


def test_fused_products_add_to_the_buffers(operands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", None, raising=False)
    gradient_fusion.install()
    rows, weights, grad = operands
    expected = torch.autograd.grad(expert_products(rows, COUNTS, weights), weights, grad)
    seen: set[tuple[int, bool]] = set()

    def hook(weight: torch.Tensor) -> None:
        """As Megatron's data parallelism, which wants to see a gradient, and forgets it."""
        seen.add((id(weight), weight.grad is not None))
        weight.grad = None

    for weight in weights[:3]:  # the last has no buffer
        weight.main_grad = torch.ones_like(weight)
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(hook)
    del weights[0].grad_added_to_main_grad  # not every owner of a buffer has hooks
    for _ in range(2):
        expert_products(rows, COUNTS, weights, fused=True).backward(grad)
    for weight, gradient in zip(weights[:3], expected, strict=False):
        torch.testing.assert_close(weight.main_grad, 1 + 2 * gradient)
    assert [weight.grad_added_to_main_grad for weight in weights[1:3]] == [True, True]
    assert seen == {(id(weights[0]), False), (id(weights[1]), True), (id(weights[2]), True)}
    torch.testing.assert_close(weights[3].grad, 2 * expected[3])


def test_a_weight_is_taken_by_a_call_of_its_module(build) -> None:
    """Data parallelism gathers a weight in the hook of its module."""
    experts, called = build("flash").decoder.layers[-1].mlp.experts, []
    linears = [m for name, m in experts.named_modules() if name.endswith(("linear_fc1", "linear_fc2"))]
    for linear in linears:
        linear.register_forward_pre_hook(lambda module, _: called.append(module))
    counts = torch.tensor([2] + [0] * (len(experts.local_experts) - 1))
    experts(torch.randn(2, 64), counts, torch.ones(2))
    assert len(called) == len(linears) == len(set(called))
