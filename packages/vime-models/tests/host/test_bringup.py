# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from vime_models.host import bringup


def test_one_process_needs_no_launcher_and_a_second_call_keeps_the_groups(world: None) -> None:
    group = parallel_state.get_tensor_model_parallel_group()
    bringup.init_world(seed=3)
    first = torch.rand(2)
    bringup.init_world(seed=3)
    assert parallel_state.get_tensor_model_parallel_group() is group
    assert dist.get_world_size() == 1
    assert torch.equal(first, torch.rand(2)), "every call sets the seeds"
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(2)
    assert not torch.equal(inside, first), "tensor-parallel regions have their own stream"


def test_sizes_must_divide_the_world(world: None) -> None:
    with pytest.raises(ValueError, match=r"multiple of tp\*pp\*cp \(6\), got 1"):
        bringup.init_world(tp=2, cp=3)
    with pytest.raises(ValueError, match=r"multiple of etp\*ep\*pp \(2\), got 1"):
        bringup.init_world(ep=2)
    assert parallel_state.model_parallel_is_initialized(), "a refused call changes nothing"


def test_device_must_exist(world: None) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is present")
    with pytest.raises(RuntimeError, match="torch finds no CUDA device"):
        bringup.init_world(device="cuda")


def test_destroyed_worlds_come_back(world: None) -> None:
    bringup.destroy_world()
    bringup.destroy_world()
    assert not dist.is_initialized()
    bringup.init_world()
    assert parallel_state.get_tensor_model_parallel_world_size() == 1
