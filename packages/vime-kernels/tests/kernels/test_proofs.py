# SPDX-License-Identifier: Apache-2.0
"""What every kernel promises on a device beside its values, for all of them from one table.

Repeatable bit by bit, blind to memory that is not its own, and captured in a CUDA graph. `tests/sanitize.py` runs the
second of these under compute-sanitizer.
"""

import pytest
import torch
from proof_case import same
from proof_cases import CASES
from proof_inputs import DEVICE

from vime_kernels import _backend


def test_the_table_has_every_operation():
    assert {name.split("-")[0] for name in CASES} >= set(_backend.IMPLEMENTED)


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
