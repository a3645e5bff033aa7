# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operation runs, decided in one place.

Order of precedence: the `backend=` argument of the call, then `set_backend` or `use_backend`, then the environment
variable `VIME_KERNELS_BACKEND_<OP>`, then `VIME_KERNELS_BACKEND`, then "auto". "auto" takes the fastest implementation
that this release has; a name given explicitly is used or refused, never replaced.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("auto", "triton", "torch")

# Fastest first. An operation without a Triton kernel is listed with its torch reference alone.
IMPLEMENTED: dict[str, tuple[str, ...]] = {
    "indexer_logits": ("torch",),
    "indexer_scores": ("torch",),
    "indexer_kl_target": ("torch",),
    "indexer_kl_loss": ("torch",),
    "topk": ("torch",),
    "gated_pool": ("torch",),
    "kpool_select": ("torch",),
    "sparse_attention": ("torch",),
    "sparse_attention_v4": ("torch",),
    "act_quant": ("torch",),
    "fake_quant_fp8": ("torch",),
    "fake_quant_fp4": ("torch",),
    "hadamard": ("torch",),
    "mhc_mixes": ("torch",),
    "sinkhorn": ("torch",),
    "mhc_pre": ("torch",),
    "mhc_post": ("torch",),
    "mhc_head": ("torch",),
}

_chosen: str | None = None


class BackendError(RuntimeError):
    """The requested backend is unknown, or has no implementation of the operation."""


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


def resolve(op: str, backend: str | None = None) -> str:
    """The implementation of `op` to run: "torch" or "triton".

    Args:
        op: a key of `IMPLEMENTED`.
        backend: the `backend=` argument of the call, None when it was not given.

    Raises:
        BackendError: an unknown name, or an explicit one that has no implementation of `op`.
    """
    name, source = _requested(op, backend)
    if name == "auto":
        return IMPLEMENTED[op][0]
    if name not in IMPLEMENTED[op]:
        raise BackendError(
            f"vime_kernels.{op}: backend {name!r} was requested by {source}, but this release has no "
            f"{name.capitalize()} backend for it (available: {', '.join(IMPLEMENTED[op])}); "
            "use 'torch' or 'auto'"
        )
    return name


def explain(op: str | None = None) -> str:
    """One line per operation: what would run now and who decided it. For logs and bug reports."""
    lines = []
    for each in IMPLEMENTED if op is None else (op,):
        name, source = _requested(each, None)
        try:
            lines.append(f"{each}: {resolve(each)} ({source} says {name!r})")
        except BackendError as error:
            lines.append(f"{each}: refused ({error})")
    return "\n".join(lines)


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
