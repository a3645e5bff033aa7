# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, with messages that say which argument, what was expected, what came and what to do.

Shapes are written as letters (`docs/notation.md`): the first tensor that uses a letter fixes its size and every later
one has to agree. Only what the host knows is checked; values on a device would cost a synchronisation.
"""

import os
from itertools import pairwise
from typing import NoReturn

import torch

FULL_PRECISION = (torch.float32, torch.float64)
FLOATING = (torch.bfloat16, torch.float16, *FULL_PRECISION)


def fail(
    op: str, expected: str, actual: object, hint: str = "", kind: type[Exception] = ValueError
) -> NoReturn:
    """Raise `kind` with the message pattern of this package."""
    raise kind(f"vime_kernels.{op}: expected {expected}, got {actual}" + (f"; {hint}" if hint else ""))


def accum_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype to compute in: float64 when any tensor is float64, else float32."""
    doubles = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if doubles else torch.float32


def sizes(op: str, /, **arguments: tuple[torch.Tensor | None, str]) -> dict[str, int]:
    """The size of every letter, after checking types, ranks, sizes and devices.

    Args:
        op: name of the operation, for messages.
        arguments: name = (tensor, shape), a shape being space-separated letters or numbers: "S H D", "3". A "?" in
            front of them makes the argument optional: None when it was not given.

    Raises:
        TypeError: something is not a tensor.
        ValueError: a rank, a size or a device differs.
    """
    found: dict[str, tuple[int, str]] = {}
    home: tuple[torch.device, str] | None = None
    for name, (tensor, shape) in arguments.items():
        optional, letters = shape.startswith("?"), shape.removeprefix("?").split()
        if tensor is None and optional:
            continue
        if not isinstance(tensor, torch.Tensor):
            fail(op, f"{name} to be a tensor [{', '.join(letters)}]", type(tensor).__name__, kind=TypeError)
        if tensor.layout != torch.strided:
            fail(op, f"{name} to be dense (torch.strided)", tensor.layout, f"pass {name}.to_dense()")
        if tensor.ndim != len(letters):
            fail(op, f"{name} of shape [{', '.join(letters)}]", list(tensor.shape))
        home = home or (tensor.device, name)
        if tensor.device != home[0]:
            fail(op, f"{name} on the device of {home[1]} ({home[0]})", tensor.device)
        for axis, letter in enumerate(letters):
            size, where = tensor.shape[axis], f"{name}.shape[{axis if axis + 1 < len(letters) else -1}]"
            known, origin = found.setdefault(letter, (int(letter), "") if letter.isdigit() else (size, where))
            if size != known:
                fail(op, f"{where} == {f'{origin} ({known})' if origin else known}", size)
    return {letter: size for letter, (size, _) in found.items()}


def pair(
    op: str, name: str, value: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The two tensors of `value`, or None twice for None."""
    if value is None:
        return None, None
    if not (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(isinstance(t, torch.Tensor) for t in value)
    ):
        kinds = (
            [type(each).__name__ for each in value]
            if isinstance(value, tuple | list)
            else type(value).__name__
        )
        fail(op, f"{name} to be a pair of tensors", kinds, kind=TypeError)
    return value


def tensor(op: str, /, **arguments: torch.Tensor) -> None:
    """Every argument is a tensor, of any shape."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            fail(op, f"{name} to be a tensor", type(value).__name__, kind=TypeError)


def floating(op: str, /, **tensors: torch.Tensor | None) -> None:
    """Every tensor is bfloat16, float16, float32 or float64."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATING:
            fail(op, f"{name} in bfloat16, float16, float32 or float64", tensor.dtype, kind=TypeError)


def full_precision(op: str, /, **tensors: torch.Tensor | None) -> None:
    """Every tensor is float32 or float64: parameters that lose the model's meaning in bfloat16."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FULL_PRECISION:
            fail(
                op,
                f"{name} in float32 (or float64)",
                tensor.dtype,
                "keep it out of .bfloat16()",
                kind=TypeError,
            )


def int32(op: str, /, **tensors: torch.Tensor | None) -> None:
    """Every tensor is int32, the one index type of this package."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != torch.int32:
            fail(op, f"{name} in torch.int32", tensor.dtype, f"pass {name}.to(torch.int32)", kind=TypeError)


def rows_contiguous(op: str, /, **tensors: torch.Tensor | None) -> None:
    """The last dimension has stride 1: the contract of every backend, so that none copies behind the scenes."""
    for name, tensor in tensors.items():
        if tensor is None or not tensor.ndim or not tensor.numel():
            continue
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            fail(op, f"{name}.stride(-1) == 1", tensor.stride(-1), f"pass {name}.contiguous()")


def positive(op: str, /, **numbers: int) -> None:
    """Every number is an int of at least 1."""
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            fail(op, f"{name} to be an int >= 1", repr(number))


def python_float(op: str, /, **numbers: float) -> None:
    """Every number is a Python float or int; a tensor would force a synchronisation and a recompilation."""
    for name, number in numbers.items():
        if not isinstance(number, float | int):
            fail(
                op,
                f"{name} to be a Python float",
                type(number).__name__,
                f"pass float({name})",
                kind=TypeError,
            )


def choice(op: str, name: str, value: str, allowed: tuple[str, ...]) -> None:
    """`value` is one of the allowed words."""
    if value not in allowed:
        fail(op, f"{name} to be one of {allowed}", repr(value))


def debugging() -> bool:
    """Whether VIME_KERNELS_DEBUG=1 asks for the checks that read a device, at the price of waiting for it."""
    return os.environ.get("VIME_KERNELS_DEBUG") == "1"


def has_values(tensor: torch.Tensor) -> bool:
    """Whether there are values to read: not while torch.compile traces, of a fake tensor or on the meta device."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return not torch.compiler.is_compiling() and plain and tensor.device.type != "meta"


def picks(
    op: str,
    rows: int,
    indices: torch.Tensor | None,
    ranges: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Under VIME_KERNELS_DEBUG=1 no index names a row from `rows` on, or a row outside [starts, ends) of `ranges`.

    Otherwise an index that is too large means no row, as a negative one does; made by mistake it would go unnoticed.
    """
    if indices is None or not indices.numel() or not debugging() or not has_values(indices):
        return
    wrong, expected = indices >= rows, f"indices below {rows} (the rows of the keys), or -1 for none"
    if ranges is not None and not wrong.any():
        starts, ends = ranges
        wrong = (indices >= 0) & ((indices < starts[:, None]) | (indices >= ends[:, None]))
        expected = "indices inside the range of their row, or -1 for none"
    if wrong.any():
        row, slot = wrong.nonzero()[0].tolist()
        fail(op, expected, f"indices[{row}, {slot}] == {int(indices[row, slot])}")


def cu_seqlens(
    op: str, cu: torch.Tensor, rows: int | None = None, pools: tuple[int, int] | None = None
) -> None:
    """`cu` is int32 [B + 1], starts at 0, never decreases and ends at `rows` or before.

    With `pools`, (tokens per pool, rows for pools), its pools fit in those rows.

    Values are read on the CPU only, or everywhere under VIME_KERNELS_DEBUG=1; never while torch.compile traces.
    """
    sizes(op, cu_seqlens=(cu, "B+1"))
    int32(op, cu_seqlens=cu)
    if cu.numel() < 1:
        fail(op, "cu_seqlens of at least one element", 0)
    if not has_values(cu) or (cu.device.type != "cpu" and not debugging()):
        return
    values = cu.tolist()
    if values[0] != 0 or any(a > b for a, b in pairwise(values)):
        fail(op, "cu_seqlens to start at 0 and never to decrease", values)
    if rows is not None and values[-1] > rows:
        fail(op, f"cu_seqlens[-1] <= {rows} (the packed rows)", values[-1])
    if pools is not None:
        ratio, room = pools
        needed = sum((b - a) // ratio for a, b in pairwise(values))
        if needed > room:
            fail(op, f"at least {needed} pooled rows, one for every {ratio} tokens of a sequence", room)
