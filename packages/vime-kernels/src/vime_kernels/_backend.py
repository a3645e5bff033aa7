# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operation runs, decided in one place.

Order of precedence: the `backend=` argument of the call, then `set_backend` or `use_backend`, then the environment
variable `VIME_KERNELS_BACKEND_<OP>`, then `VIME_KERNELS_BACKEND`, then "auto". "auto" takes Triton when the tensors are
on the current CUDA device, its capability is 9.0 or later and the kernel supports the call, else torch; a name given
explicitly is used or refused, never replaced.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

NAMES = ("auto", "triton", "torch")
MIN_CAPABILITY = (9, 0)

# Fastest first. An operation without a Triton kernel is listed with its torch reference alone.
IMPLEMENTED: dict[str, tuple[str, ...]] = {
    "indexer_logits": ("triton", "torch"),
    "indexer_scores": ("triton", "torch"),
    "indexer_kl_target": ("triton", "torch"),
    "indexer_kl_loss": ("triton", "torch"),
    "topk": ("triton", "torch"),
    "gated_pool": ("triton", "torch"),
    "kpool_select": ("triton", "torch"),
    "sparse_attention": ("triton", "torch"),
    "sparse_attention_v4": ("triton", "torch"),
    "act_quant": ("triton", "torch"),
    "fake_quant_fp8": ("triton", "torch"),
    "fake_quant_fp4": ("triton", "torch"),
    "hadamard": ("triton", "torch"),
    "mhc_mixes": ("triton", "torch"),
    "sinkhorn": ("triton", "torch"),
    "mhc_pre": ("triton", "torch"),
    "mhc_post": ("triton", "torch"),
    "mhc_head": ("triton", "torch"),
    "rotate": ("triton", "torch"),
    "swiglu": ("triton", "torch"),
    "gather_sum": ("triton", "torch"),
}

# Looked for, not imported. A constant, because torch.compile traces what decides.
_HAS_TRITON = find_spec("triton") is not None

_chosen: str | None = None
_warned: set[tuple[str, str]] = set()


class BackendError(RuntimeError):
    """The requested backend is unknown, or cannot run the operation."""


def set_backend(name: str | None) -> None:
    """The backend of every later call in this process; None gives the choice back to the environment.

    Raises:
        BackendError: the name is not one of "auto", "triton", "torch".
    """
    global _chosen
    if name is not None:
        _check_name(name, "set_backend")
    _chosen = name


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """`set_backend` for the length of a `with` block. Like it, for the whole process and not per thread."""
    before = _chosen
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def resolve(
    op: str,
    backend: str | None = None,
    tensors: Iterable[torch.Tensor | None] = (),
    unsupported: str | None = None,
) -> str:
    """The implementation of `op` to run: "torch" or "triton".

    Args:
        op: a key of `IMPLEMENTED`.
        backend: the `backend=` argument of the call, None when it was not given.
        tensors: the tensors of the call; without any, "auto" means torch.
        unsupported: why the Triton kernel cannot do this call, in words that fit after "it does not support"; None when
            it can.

    Raises:
        BackendError: an unknown name, or an explicit one that cannot run this call.
    """
    name, source = _requested(op, backend)
    if name == "torch":
        return "torch"
    if "triton" not in IMPLEMENTED[op]:
        if name == "auto":
            return "torch"
        raise BackendError(
            f"vime_kernels.{op}: backend 'triton' was requested by {source}, but this release has no Triton backend "
            f"for it (available: {', '.join(IMPLEMENTED[op])}); use 'torch' or 'auto'"
        )
    given = [t for t in tensors if t is not None]
    on_cuda = len(given) > 0 and all(t.is_cuda for t in given)
    if name == "auto" and not on_cuda:
        return "torch"
    reason = _machine_reason(given[0].device if on_cuda else None) or (
        f"it does not support {unsupported}" if unsupported else None
    )
    if reason is None:
        return "triton"
    if name == "triton":
        raise BackendError(
            f"vime_kernels.{op}: backend 'triton' was requested by {source}, but {reason}; use 'torch' or 'auto'"
        )
    _warn_once(op, reason)
    return "torch"


def explain(op: str | None = None) -> str:
    """One line per operation: what would run now and who decided it. For logs and bug reports.

    Raises:
        BackendError: `op` is not an operation of this package.
    """
    if op is not None and op not in IMPLEMENTED:
        raise BackendError(f"vime_kernels.explain: expected one of {', '.join(IMPLEMENTED)}, got {op!r}")
    lines = []
    for each in IMPLEMENTED if op is None else (op,):
        name, source = _requested(each, None)
        if name == "auto" and "triton" in IMPLEMENTED[each]:
            capability = ".".join(map(str, MIN_CAPABILITY))
            outcome = f"triton on CUDA devices of capability >= {capability}, else torch"
        elif name == "auto" or name in IMPLEMENTED[each]:
            outcome = "torch" if name == "auto" else name
        else:
            outcome = f"refused, available: {', '.join(IMPLEMENTED[each])}"
        lines.append(f"{each}: {outcome} ({source} says {name!r})")
    return "\n".join(lines)


def without_autocast[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function` in the dtypes that it is given.

    Autocast would round the products of the torch backend to 16 bits. It does not reach into the kernels, and what a
    call computes must not depend on the backend.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def has_gluon() -> bool:
    """Whether Triton's Gluon is a version that the kernels written in it were run with: it changes with every minor."""
    try:
        return _HAS_TRITON and version("triton").startswith("3.6.")
    except PackageNotFoundError:  # from a distribution of another name
        return False


def _warn_once(op: str, reason: str) -> None:
    if (op, reason) not in _warned:
        _warned.add((op, reason))
        message = f"vime_kernels.{op}: runs on the torch backend, because for Triton {reason}"
        warnings.warn(message, stacklevel=4)


# torch.compile cannot trace a warning, so it is given at that time. This is what torch.compiler.assume_constant_result
# does; calling that here would import Triton.
_warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _machine_reason(device: torch.device | None) -> str | None:
    """Why no Triton kernel can run on this device, in words; None when one can. No device stands for the CPU."""
    if not _HAS_TRITON:
        return "the package triton is not installed"
    if interpreting():
        return None
    if device is None:
        return "its tensors are not all on a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"the device has capability {capability}, below {MIN_CAPABILITY}"
    # Triton launches on the current device, whatever its tensors are on.
    if device.index is not None and device.index != torch.cuda.current_device():
        current = f"cuda:{torch.cuda.current_device()}"
        return f"its tensors are on {device} and the current device is {current} (see torch.cuda.device)"
    return None


def _requested(op: str, argument: str | None) -> tuple[str, str]:
    """The requested name and, in words, where it comes from."""
    variables = (f"VIME_KERNELS_BACKEND_{op.upper()}", "VIME_KERNELS_BACKEND")
    candidates = [(argument, "the argument backend="), (_chosen, "set_backend()")]
    candidates += [
        (os.environ.get(variable), f"the environment variable {variable}") for variable in variables
    ]
    for name, source in candidates:
        if name:
            return _check_name(name, source), source
    return "auto", "the default"


def _check_name(name: str, source: str) -> str:
    if name not in NAMES:
        raise BackendError(f"vime_kernels: expected one of {NAMES} from {source}, got {name!r}")
    return name
