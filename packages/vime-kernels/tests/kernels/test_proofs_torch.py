# SPDX-License-Identifier: Apache-2.0
"""What every operation promises to torch, for all of them from one table.

Traced by torch.compile without a break, foretold by fake tensors, the same under autocast, without a second derivative
rather than with a wrong one.
"""

import pytest
import torch
from proof_case import Case, same
from proof_inputs import DEVICE, INTERPRETING, Tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vime_kernels import use_backend
from vime_kernels.testing import assert_bitwise

# Triton 3.6 reads loop bounds from one-element arrays in its interpreter, which NumPy deprecates.
# And NumPy warns where infinities of rows without a key meet, which both backends mask afterwards.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.fixture
def tensors(case, device) -> Tensors:
    """Inputs of a case, on a device or for the interpreter."""
    made = case.make()
    if INTERPRETING and any(t.dtype == torch.float8_e4m3fn for t in made):
        pytest.skip("the interpreter has no products of 8 bits")
    return made


def test_compiles_without_a_graph_break(case, tensors):
    expected = case.run(tensors)
    torch._dynamo.reset()
    compiled = torch.compile(case.call, fullgraph=True, backend="aot_eager", dynamic=False)
    traced = Case(compiled, case.make, case.leaves, case.unread, case.atomic)
    same(case, traced.run(tensors), expected)


class Calls(TorchDispatchMode):
    """Collects what is called of our operators, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[torch._ops.OpOverload, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "vime_kernels":
            self.seen[func] = args
        return func(*args, **(kwargs or {}))


def test_operators_keep_their_schema_and_their_fakes_tell_the_truth(case, tensors):
    with use_backend("triton"), Calls() as calls:
        case.run(tuple(spread(t) for t in tensors))
    assert calls.seen
    for operator, args in calls.seen.items():
        # torch's checker multiplies the inputs, and CUDA has no product of 8-bit numbers.
        if not any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float8_e4m3fn for arg in args):
            torch.library.opcheck(operator, args, test_utils="test_schema")
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
        assert layouts(fake) == layouts(operator(*args)), operator


def layouts(results: torch.Tensor | Tensors | None) -> list[tuple]:
    """What a fake has to foretell."""
    each = results if isinstance(results, tuple) else () if results is None else (results,)
    return [(r.dtype, r.shape, r.stride(), r.device) for r in each]


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap of NaN, or of rows that do not exist, behind each row."""
    if tensor.ndim < 2:
        return tensor
    gap = float("nan") if tensor.is_floating_point() else 2**30
    room = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 16), gap, device=DEVICE).to(tensor.dtype)
    return room[..., : tensor.shape[-1]].copy_(tensor)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_fake_tensors_foretell_the_results(case, tensors, backend):
    with use_backend(backend):
        real = case.call(*tensors)
        with FakeTensorMode() as mode:
            fake = case.call(*(mode.from_tensor(t) for t in tensors))
    assert layouts(fake) == layouts(real)


def test_autocast_does_not_reach_the_torch_backend(case, tensors):
    with use_backend("torch"), torch.no_grad():
        expected = case.call(*tensors)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            got = case.call(*tensors)
    for a, b in zip(
        *((each if isinstance(each, tuple) else (each,)) for each in (got, expected)), strict=True
    ):
        assert_bitwise(a, b)


def test_second_derivatives_of_the_kernels_are_refused(case, tensors):
    inputs = [t.detach().requires_grad_() for t in tensors[: case.leaves]]
    with use_backend("triton"):
        outputs = case.call(*inputs, *tensors[case.leaves :])
    outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.requires_grad]
    assert bool(outputs) == bool(case.leaves)
    ones = [torch.ones_like(o) for o in outputs]
    grads = torch.autograd.grad(outputs, inputs, ones, create_graph=True) if outputs else []
    assert all(g.requires_grad != case.linear for g in grads)
    for grad in grads:
        if grad.requires_grad:
            with pytest.raises(RuntimeError, match="no autograd formula was registered"):
                torch.autograd.grad(grad.sum(), inputs, retain_graph=True)
