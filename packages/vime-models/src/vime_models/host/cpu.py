# SPDX-License-Identifier: Apache-2.0
"""Lets megatron-core 0.19.2 build, run, recompute and checkpoint a model where there is no CUDA device.

Megatron asks `torch.cuda` for a current device, streams and random-number states without asking first whether
a device exists. `install` answers those questions for the CPU with a closed list of replacements; everything
else stays as it is, and `torch.cuda.is_available()` stays False. There is no uninstall: a test that needs a
pristine `torch.cuda` runs in a subprocess.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class Stream:
    """Stand-in for `torch.cuda.Stream`: the CPU runs in order, so there is nothing to wait for.

    A class and not a function, because annotations such as `torch.cuda.Stream | None` are evaluated by
    libraries at import.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing is pending."""

    def wait_stream(self, stream: "Stream") -> None:
        """Work is already in order."""

    def wait_event(self, event: "Event") -> None:
        """Work is already in order."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """The given event, or a new one."""
        return event if event is not None else Event()

    def query(self) -> bool:
        """True: all work is done."""
        return True


class Event:
    """Stand-in for `torch.cuda.Event`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        """Nothing to mark."""

    def wait(self, stream: Stream | None = None) -> None:
        """Work is already in order."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Zero milliseconds: these events measure nothing."""
        return 0.0


_ONE_STREAM = Stream()


def _default_stream(device: Any = None) -> Stream:
    return _ONE_STREAM


def _stream_context(stream: Any = None) -> AbstractContextManager[None]:
    return nullcontext()


def _current_device() -> torch.device:
    # Every use in Megatron is `device=...` or `.to(...)`, which take a device as well as an index.
    return CPU


def _synchronize(device: Any = None) -> None:
    return None


def _get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


_TORCH_CUDA: Mapping[str, Any] = {
    "current_device": _current_device,
    "Stream": Stream,
    "Event": Event,
    "current_stream": _default_stream,
    "default_stream": _default_stream,
    "stream": _stream_context,
    "synchronize": _synchronize,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": _manual_seed,
}


def _split_sizes_to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """`maybe_move_tensor_to_cpu` that also converts what is already on the CPU.

    The original converts only tensors that it moves, so on the CPU `all_to_all_single` would receive tensors
    as split sizes, which gloo rejects.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def installed() -> bool:
    """True when `install` has replaced the functions of `torch.cuda` in this process."""
    return torch.cuda.Stream is Stream


def install() -> bool:
    """Install the replacements; True when they are in place, False when a CUDA device makes them unneeded.

    Idempotent. Call it before any Megatron object is built; Megatron may be imported already or not.
    """
    if torch.cuda.is_available():
        return False
    if installed():
        return True
    for name, replacement in _TORCH_CUDA.items():
        setattr(torch.cuda, name, replacement)

    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    megatron_random._get_cuda_rng_state = _get_rng_state
    megatron_random._set_cuda_rng_state = _set_rng_state
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_to_numpy
    return True


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.split(":")[0] == "cuda") or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _CudaLiteralsToCpu(TorchFunctionMode):
    """Redirects literal CUDA devices and pinned memory in torch calls to plain CPU memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(value) else value for value in args)
        return func(*args, **kwargs)


def cuda_literals_to_cpu() -> AbstractContextManager[Any]:
    """A context in which `device="cuda"`, `.cuda()` and `pin_memory=True` mean the CPU.

    Needed around Megatron's argument validation, its pipeline schedules and its checkpoint writer, which name
    the device literally. Does nothing where the shim is not installed, so callers need no branch.
    """
    return _CudaLiteralsToCpu() if installed() else nullcontext()


CPU_CONFIG: Mapping[str, Any] = {
    "use_cpu_initialization": True,
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
}


def cpu_overrides(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a `TransformerConfig` with everything that needs a GPU or TransformerEngine off.

    Args:
        kwargs: the caller's keywords. `params_dtype` and `pipeline_dtype` are kept; the default of both is
            float32 (`pipeline_dtype` follows `params_dtype`).
    """
    params_dtype = kwargs.get("params_dtype", torch.float32)
    dtypes = {"params_dtype": params_dtype, "pipeline_dtype": kwargs.get("pipeline_dtype", params_dtype)}
    return {**kwargs, **CPU_CONFIG, **dtypes}
