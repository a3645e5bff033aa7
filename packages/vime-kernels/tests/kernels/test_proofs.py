# SPDX-License-Identifier: Apache-2.0
"""What every operation promises beside its values, for all of them from one table.

Longer than 350 lines, because a case is written once and every promise is checked on each.

Traced by torch.compile without a break, foretold by fake tensors, the same under autocast, without a second derivative
rather than with a wrong one; and on a device captured in a CUDA graph, repeatable bit by bit, blind to memory that is
not its own. `tests/sanitize.py` runs the last of these under compute-sanitizer.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vime_kernels import _backend, dsa, mhc, moe, quant, use_backend
from vime_kernels.testing import assert_bitwise, rel_rms

# Triton 3.6 reads loop bounds from one-element arrays in its interpreter, which NumPy deprecates.
# And NumPy warns where infinities of rows without a key meet, which both backends mask afterwards.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

Tensors = tuple[torch.Tensor, ...]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETING:
    DEVICE, SHORT = "cpu", torch.float32
    S, N, H, D, K, EDGE, WIDE, TAIL, LONG = 3, 20, 2, 16, 8, 2, 16, 16, 8
    CU = (0, 3, 3, 12, 18)
else:
    DEVICE, SHORT = "cuda", torch.bfloat16
    S, N, H, D, K, EDGE, WIDE, TAIL, LONG = 37, 300, 16, 64, 40, 8, 512, 64, 128
    CU = (0, 3, 3, 150, 290)  # a short sequence, an empty one, and rows of no sequence at the end


@dataclass(frozen=True)
class Case:
    """One operation: `call(*tensors)` gives a tensor or several; gradients go to the first `leaves` tensors.

    `unread` tells what no result depends on, as {number of the tensor: index}.
    """

    call: Callable[..., torch.Tensor | Tensors]
    make: Callable[[], Tensors]
    leaves: int = 0
    unread: Callable[[], dict[int, object]] = dict
    atomic: bool = False  # some gradient is a sum in no fixed order
    linear: bool = False  # the gradient does not depend on the inputs

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        """Outputs, and the gradients of a fixed weighting of them."""
        inputs = [t.detach().requires_grad_(i < self.leaves) for i, t in enumerate(tensors)]
        with torch.set_grad_enabled(self.leaves > 0):
            outputs = self.call(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results = [o.detach() for o in outputs]
        differentiable = [o for o in outputs if o.requires_grad]
        if differentiable:
            weights = [
                torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape) for o in differentiable
            ]
            grads = [w.to(o.dtype) for w, o in zip(weights, differentiable, strict=True)]
            results += torch.autograd.grad(differentiable, inputs[: self.leaves], grads)
        return results


def randn(*shape: int, dtype: torch.dtype = SHORT) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def f32(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=torch.float32)


def int32(values: object) -> torch.Tensor:
    return torch.as_tensor(values, device=DEVICE).to(torch.int32).contiguous()


def ranges(rows: int = S) -> Tensors:
    """Ranges that leave out the first and the last EDGE rows of the keys."""
    starts = torch.randint(EDGE, N // 2, (rows,), device=DEVICE)
    return int32(starts), int32(starts + torch.randint(0, N // 2 - EDGE, (rows,), device=DEVICE))


def picks(rows: int = S, holes: slice = slice(None, None, 9)) -> torch.Tensor:
    """Distinct rows from EDGE on, ascending, a few slots empty, a row without any."""
    best = torch.rand(rows, N - 2 * EDGE, device=DEVICE).topk(K, 1).indices.sort(1).values + EDGE
    best[:, holes], best[rows // 2] = -1, -1
    return int32(best)


def edges_of(number: int) -> Callable[[], dict[int, object]]:
    """The first and last EDGE rows of a tensor of N keys."""
    return lambda: {number: [*range(EDGE), *range(N - EDGE, N)]}


def tail_of(*numbers: int) -> Callable[[], dict[int, object]]:
    """Rows behind the last sequence."""
    return lambda: {number: slice(CU[-1], N) for number in numbers}


def attention(deterministic: bool, d_v: int) -> Callable[..., Tensors]:
    def call(q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, indices: torch.Tensor) -> Tensors:
        return dsa.sparse_attention(
            q, kv, indices, 0.1, d_v=d_v, attn_sink=sinks, return_lse=True, deterministic=deterministic
        )

    return call


def attention_v4(deterministic: bool, by: str) -> Callable[..., Tensors]:
    def call(
        q: torch.Tensor, kv: torch.Tensor, pooled: torch.Tensor, sink: torch.Tensor, *rest: torch.Tensor
    ) -> Tensors:
        chosen = {"indices": rest[0]} if by == "picks" else {"cmp_ranges": rest[:2]}
        return dsa.sparse_attention_v4(
            q, kv, pooled, 0.1, sink, **chosen, window=EDGE, cu_seqlens=rest[-1],
            q_positions=torch.arange(0, N, N // S, device=q.device, dtype=torch.int32)[:S],
            return_lse=True, deterministic=deterministic,
        )  # fmt: skip

    return call


CASES: dict[str, Case] = {
    "indexer_logits": Case(
        lambda *t: dsa.indexer_logits(*t),
        lambda: (randn(S, H, D), randn(N, D), f32(S, H), *ranges()),
        unread=edges_of(1),
    ),
    "indexer_logits-many-rows": Case(  # enough of them for the kernel written for Hopper
        lambda *t: dsa.indexer_logits(*t),
        lambda: (randn(30 * S, 2 * H, 2 * D), randn(N, 2 * D), f32(30 * S, 2 * H), *ranges(30 * S)),
        unread=edges_of(1),
    ),
    "indexer_logits-fp8": Case(
        lambda q, k, w, lo, hi, qs, ks: dsa.indexer_logits(q, k, w, lo, hi, q_scale=qs, k_scale=ks),
        lambda: (
            *(randn(*shape).to(torch.float8_e4m3fn) for shape in ((S, H, D), (N, D))),
            *(f32(S, H), *ranges(), f32(S, H).abs(), f32(N).abs()),
        ),
        unread=edges_of(6),
    ),
    "indexer_topk": Case(
        lambda *t: dsa.indexer_topk(*t, 24),
        lambda: (randn(S, H, D), randn(N, D), f32(S, H), *ranges()),
        unread=edges_of(1),
    ),
    "lightning_indexer": Case(
        lambda *t: dsa.lightning_indexer(*t, 24, deterministic=True),
        lambda: (randn(S, H, D), randn(N, D), f32(S, H), *ranges()),
        leaves=3,
        unread=edges_of(1),
    ),
    "topk": Case(
        lambda *t: dsa.topk(t[0], 24, *t[1:]),
        lambda: (f32(S, N), int32([EDGE] * S), int32([N - EDGE] * S)),
        unread=lambda: {0: (slice(None), [*range(EDGE), *range(N - EDGE, N)])},
    ),
    "topk-long": Case(
        lambda *t: dsa.topk(t[0], 50 * S, *t[1:]),
        lambda: (f32(3, 540 * S), int32([9] * 3), int32([539 * S] * 3)),
        unread=lambda: {0: (slice(None), slice(0, 9))},
    ),
    "indexer_scores": Case(
        lambda *t: dsa.indexer_scores(*t),
        lambda: (randn(S, H, D), randn(N, D), f32(S, H), picks()),
        leaves=3,
        unread=edges_of(1),
        atomic=True,
    ),
    "indexer_scores-repeatable": Case(
        lambda *t: dsa.indexer_scores(*t, deterministic=True),
        lambda: (randn(S, H, D), randn(N, D), f32(S, H), picks()),
        leaves=3,
        unread=edges_of(1),
    ),
    "indexer_scores-many-rows": Case(  # enough of them for the kernel written for Hopper
        lambda *t: dsa.indexer_scores(*t),
        lambda: (randn(15 * S, 2 * H, 2 * D), randn(N, 2 * D), f32(15 * S, 2 * H), picks(15 * S)),
        leaves=3,
        unread=edges_of(1),
        atomic=True,
    ),
    "indexer_scores-many-rows-repeatable": Case(
        lambda *t: dsa.indexer_scores(*t, deterministic=True),
        lambda: (
            *(randn(15 * S, 4 * H, 2 * D), randn(N, 2 * D), f32(15 * S, 4 * H)),
            picks(15 * S, slice(K - 3, None)),
        ),
        leaves=3,
        unread=edges_of(1),
    ),
    "indexer_kl_target": Case(
        lambda q, k, i, lse: dsa.indexer_kl_target(q, k, i, 0.1, lse=lse),
        lambda: (randn(S, H, D + 16), randn(N, D + 16), picks(), f32(S, H) + 5),
        unread=edges_of(1),
    ),
    "indexer_kl_target-tail": Case(
        lambda q, k, i, lse: dsa.indexer_kl_target(q, k, i, 0.1, lse=lse),
        lambda: (randn(S, 4 * H, WIDE + TAIL), randn(N, WIDE + TAIL), picks(), f32(S, 4 * H) + 5),
        unread=edges_of(1),
    ),
    "indexer_kl_target-own-lse": Case(
        lambda q, k, i: dsa.indexer_kl_target(q, k, i, 0.1),
        lambda: (randn(S, H, D), randn(N, D), picks()),
        unread=edges_of(1),
    ),
    "indexer_kl_loss": Case(
        lambda s, t, i, m: dsa.indexer_kl_loss(s, t, i, coeff=0.5, row_mask=m),
        lambda: (f32(S, K), f32(S, K).abs(), picks(), torch.arange(S, device=DEVICE) % 5 > 0),
        leaves=1,
        unread=lambda: {0: slice(0, S, 5), 1: slice(0, S, 5)},
    ),
    "gated_pool": Case(
        lambda x, s, a, c: dsa.gated_pool(x, s, a, c, 4),
        lambda: (randn(N, D), randn(N, D), f32(4, D), int32(CU)),
        leaves=3,
        unread=tail_of(0, 1),
    ),
    "gated_pool-overlap": Case(
        lambda x, s, a, hx, hs, c: dsa.gated_pool(x, s, a, c, 4, overlap=True, halo=(hx, hs)),
        lambda: (randn(N, 2 * D), randn(N, 2 * D), f32(4, 2 * D), randn(4, 2 * D), randn(4, 2 * D), int32(CU)),
        leaves=5,
        unread=tail_of(0, 1),
    ),
    "gated_pool-long": Case(
        lambda x, s, a, c: dsa.gated_pool(x, s, a, c, LONG),
        lambda: (randn(N, D), randn(N, D), f32(LONG, D), int32(CU)),
        leaves=3,
        unread=tail_of(0, 1),
    ),
    "kpool_select": Case(
        lambda q, k, w, c, at: dsa.kpool_select(q, k, w, c, 4 * EDGE, 4, q_positions=at),
        lambda: (randn(N, H, D), randn(N // 4, D), f32(N, H), int32(CU), int32(range(N))),
    ),
    "sparse_attention": Case(
        attention(False, WIDE),
        lambda: (randn(S, 4 * H, WIDE), randn(N, WIDE), f32(4 * H), picks()),
        leaves=3,
        unread=edges_of(1),
        atomic=True,
    ),
    "sparse_attention-tail-repeatable": Case(
        attention(True, WIDE),
        lambda: (randn(S, 4 * H, WIDE + TAIL), randn(N, WIDE + TAIL), f32(4 * H), picks()),
        leaves=3,
        unread=edges_of(1),
    ),
    "sparse_attention-narrow-repeatable": Case(
        attention(True, D),
        lambda: (randn(S, 5, D), randn(N, D), f32(5), picks()),
        leaves=3,
        unread=edges_of(1),
    ),
    "sparse_attention_v4-picks": Case(
        attention_v4(False, "picks"),
        lambda: (randn(S, 4 * H, WIDE), randn(N, WIDE), randn(N, WIDE), f32(4 * H), picks(), int32(CU)),
        leaves=4,
        unread=edges_of(2),
        atomic=True,
    ),
    "sparse_attention_v4-few-heads": Case(  # neighbouring rows share a program on Hopper
        attention_v4(False, "picks"),
        lambda: (
            *(randn(S, H, WIDE), randn(N, WIDE), randn(N, WIDE), f32(H)),
            *(picks(holes=slice(K - 3, None)), int32(CU)),
        ),
        leaves=4,
        unread=edges_of(2),
        atomic=True,
    ),
    "sparse_attention_v4-ranges": Case(
        attention_v4(True, "ranges"),
        lambda: (randn(S, 4 * H, WIDE), randn(N, WIDE), randn(N, WIDE), f32(4 * H), *ranges(), int32(CU)),
        leaves=4,
        unread=edges_of(2),
    ),
    "act_quant": Case(lambda x: quant.act_quant(x, 16), lambda: (randn(S, 2, 32),)),
    "act_quant-rotated": Case(lambda x: quant.act_quant(x, 16, rotate=True), lambda: (randn(S, 2, 32),)),
    "fake_quant_fp8": Case(
        lambda x: quant.fake_quant_fp8(x, 16, channels=16),
        lambda: (randn(S, 2, 32),),
        leaves=1,
        linear=True,
    ),
    "fake_quant_fp4": Case(
        lambda x: quant.fake_quant_fp4(x, 16, rotate=True),
        lambda: (randn(S, 2, 32),),
        leaves=1,
        linear=True,
    ),
    "hadamard": Case(lambda x: quant.hadamard(x), lambda: (randn(S, 2, 32),), leaves=1, linear=True),
    "mhc_mixes": Case(
        lambda *t: mhc.mhc_mixes(*t, eps=1e-6, iters=3, norm_eps=1e-6),
        lambda: (randn(S, 4, D), f32(24, 4 * D) / 16, f32(3), f32(24)),
        leaves=4,
    ),
    "sinkhorn": Case(lambda x: mhc.sinkhorn(x, iters=4), lambda: (f32(S, 4, 4),), leaves=1),
    "mhc_pre": Case(lambda *t: mhc.mhc_pre(*t), lambda: (randn(S, 4, 40), f32(S, 4)), leaves=2),
    "mhc_post": Case(
        lambda *t: mhc.mhc_post(*t),
        lambda: (randn(S, 40), randn(S, 4, 40), f32(S, 4), f32(S, 4, 4)),
        leaves=4,
    ),
    "mhc_head": Case(
        lambda *t: mhc.mhc_head(*t, eps=1e-6, norm_eps=1e-6),
        lambda: (randn(S, 4, D), f32(4, 4 * D) / 16, f32(1), f32(4)),
        leaves=4,
    ),
    "rotate": Case(
        lambda x, a: dsa.rotate(x, a.cos(), a.sin(), inverse=True),
        lambda: (randn(S, 4, 24), f32(S, 8)),
        leaves=1,
        linear=True,
    ),
    "rotate-norm": Case(
        lambda x, a: dsa.rotate(x, a.cos(), a.sin(), norm_eps=1e-6),
        lambda: (randn(S, 4, 24), f32(S, 8)),
        leaves=1,
    ),
    "swiglu": Case(
        lambda x, w: moe.swiglu(x, w, limit=1.0), lambda: (randn(S, 40), f32(S)), leaves=2
    ),
    "gather_sum": Case(
        lambda x, rows: moe.gather_sum(x, rows),
        lambda: (randn(S, D), int32([[0, -1], [S, S - 1]] * S)),
    ),
}  # fmt: skip


def test_the_table_has_every_operation():
    assert {name.split("-")[0] for name in CASES} >= set(_backend.IMPLEMENTED)


@pytest.fixture(params=CASES)
def case(request) -> Case:
    torch.manual_seed(0)
    return CASES[request.param]


def same(case: Case, got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if case.atomic:
            a, b = (torch.nan_to_num(t.double(), neginf=0.0) for t in (a, b))
            assert rel_rms(a, b) < 4e-3
        else:
            assert_bitwise(a, b, f"result {number}")


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with garbage before and behind them in memory: NaN, or rows that do not exist."""
    guard = 4096
    room = torch.empty(tensor.numel() + 2 * guard, dtype=tensor.dtype, device=DEVICE)
    raw = room.view(torch.uint8)  # all ones is a NaN in every floating type
    raw.fill_(0x7F if tensor.dtype in (torch.int32, torch.float8_e4m3fn) else 0xFF)
    inside = room[guard : guard + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)


@pytest.mark.gpu
def test_twenty_launches_give_the_same_bits(case):
    if case.atomic:
        pytest.skip(
            "a gradient of this mode is a sum in no fixed order; its repeatable mode has a case of its own"
        )
    tensors = case.make()
    first = case.run(tensors)
    for _ in range(19):
        same(case, case.run(tensors), first)


@pytest.mark.gpu
def test_memory_that_is_not_its_own_does_not_matter(case):
    tensors = case.make()
    expected = case.run(tensors)
    poisoned = tuple(guarded(t) for t in tensors)
    for number, index in case.unread().items():
        poisoned[number][index] = float("nan")
    same(case, case.run(poisoned), expected)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def tensors(request, case) -> Tensors:
    """Inputs of a case, on a device or for the interpreter."""
    if (request.param == "interpreter") != INTERPRETING:
        pytest.skip("TRITON_INTERPRET=1 is set by test_interpreter.py only")
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


@pytest.mark.gpu
def test_replays_in_a_cuda_graph_with_new_values(case):
    torch.manual_seed(1)
    values = [case.make() for _ in range(2)]
    fixed = tuple(t.clone() for t in values[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.run(fixed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.run(fixed)
    for tensor, new in zip(fixed, values[1], strict=True):
        tensor.copy_(new)
    for result in results:
        result.fill_(7)
    graph.replay()
    same(case, results, case.run(values[1]))
