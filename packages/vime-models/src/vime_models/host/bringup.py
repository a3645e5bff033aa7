# SPDX-License-Identifier: Apache-2.0
"""Process group, parallel state and seeds: the few lines that Megatron needs before a model is built.

`megatron.training.initialize` insists on CUDA; these functions do the same work on either device, in a single
process or under torchrun.
"""

import os
import random
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from vime_models._compat import check_megatron
from vime_models.host import cpu

Device = Literal["cpu", "cuda"]


def init_world(
    *,
    device: Device = "cpu",
    seed: int = 1234,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: int = 1,
    vpp: int | None = None,
) -> None:
    """Make this process ready to build a model.

    Idempotent: an existing process group is used as it is, a parallel state of the same sizes too. A parallel
    state of other sizes is replaced, after which models built earlier must not be used. Every call sets the
    seeds.

    Args:
        device: "cpu" (gloo, with the shim of `host.cpu`) or "cuda" (nccl, device LOCAL_RANK).
        seed: of Python, numpy, torch and Megatron's random-number tracker; pipeline stages differ.
        tp, pp, ep, etp, cp: sizes of tensor, pipeline, expert, expert-tensor and context parallelism.
        vpp: model chunks of a pipeline stage that interleave, None for one.

    Raises:
        RuntimeError: the device is not there.
        ValueError: the sizes do not divide the number of processes.
    """
    check_megatron()
    if device == "cpu" and not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # in time only if nothing has looked for devices yet
    if device == "cpu" and not cpu.install():
        raise RuntimeError(
            "vime_models.host.bringup: device='cpu' on a machine with CUDA; "
            "set CUDA_VISIBLE_DEVICES= (empty) before Python starts, or pass device='cuda'"
        )
    if device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("vime_models.host.bringup: device='cuda', but torch finds no CUDA device")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        _init_process_group("gloo" if device == "cpu" else "nccl")
    sizes = (tp, pp, ep, etp, cp, vpp)
    for name, per_rank in (("tp*pp*cp", tp * pp * cp), ("etp*ep*pp", etp * ep * pp)):
        if dist.get_world_size() % per_rank:
            raise ValueError(
                f"vime_models.host.bringup: expected a number of processes that is a multiple of {name} "
                f"({per_rank}), got {dist.get_world_size()}"
            )
    if parallel_state.model_parallel_is_initialized() and _current_sizes() != sizes:
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            virtual_pipeline_model_parallel_size=vpp,
        )
    set_seeds(seed)


def set_seeds(seed: int) -> None:
    """Seed Python, numpy, torch and Megatron's tracker; needs the parallel state.

    Pipeline stages get different seeds, as in megatron.training, so that their layers do not start equal.
    """
    staged = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(staged)
    np.random.seed(staged)  # noqa: NPY002 - seeds the generator that libraries use
    torch.manual_seed(staged)
    model_parallel_cuda_manual_seed(staged, force_reset_rng=True)


def on_gloo() -> bool:
    """Whether the ranks talk over gloo, which lacks some of what nccl can do."""
    return dist.is_initialized() and dist.get_backend() == "gloo"


def destroy_world() -> None:
    """Undo `init_world`: parallel state, then process group. Does nothing where there is none."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _init_process_group(backend: str) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        # One process talks to nobody, so its store needs no port.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _current_sizes() -> tuple[int, int, int, int, int, int | None]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    )
