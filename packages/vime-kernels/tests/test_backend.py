# SPDX-License-Identifier: Apache-2.0
"""Who decides the backend, in which order, and what an impossible choice says."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from vime_kernels import BackendError, _backend, dsa, explain, set_backend, use_backend


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    for variable in ("VIME_KERNELS_BACKEND", "VIME_KERNELS_BACKEND_TOPK"):
        monkeypatch.delenv(variable, raising=False)
    set_backend(None)
    yield
    set_backend(None)


def test_auto_is_torch_for_every_operation():
    assert {_backend.resolve(op) for op in _backend.IMPLEMENTED} == {"torch"}


@pytest.mark.parametrize(
    "argument, chosen, op_variable, variable, source",
    [
        ("triton", "torch", "torch", "torch", "the argument backend="),
        (None, "triton", "torch", "torch", "set_backend()"),
        (None, None, "triton", "torch", "VIME_KERNELS_BACKEND_TOPK"),
        (None, None, None, "triton", "VIME_KERNELS_BACKEND"),
    ],
    ids=["argument", "set_backend", "variable-of-op", "variable"],
)
def test_the_first_source_wins(monkeypatch, argument, chosen, op_variable, variable, source):
    set_backend(chosen)
    if op_variable:
        monkeypatch.setenv("VIME_KERNELS_BACKEND_TOPK", op_variable)
    if variable:
        monkeypatch.setenv("VIME_KERNELS_BACKEND", variable)
    with pytest.raises(BackendError, match="backend 'triton' was requested by") as caught:
        _backend.resolve("topk", argument)
    assert f"requested by {source}" in str(caught.value).replace("the environment variable ", "")
    assert "use 'torch' or 'auto'" in str(caught.value)
    assert _backend.resolve("topk", "torch") == "torch"


def test_use_backend_restores_also_after_an_error():
    set_backend("torch")
    with pytest.raises(BackendError), use_backend("triton"):
        _backend.resolve("topk")
    assert "set_backend() says 'torch'" in explain("topk")


@pytest.mark.parametrize("where", ["argument", "set_backend", "environment"])
def test_unknown_names_are_refused(monkeypatch, where):
    if where == "environment":
        monkeypatch.setenv("VIME_KERNELS_BACKEND", "tilelang")
    call = {
        "argument": lambda: _backend.resolve("topk", "tilelang"),
        "set_backend": lambda: set_backend("tilelang"),
        "environment": lambda: _backend.resolve("topk"),
    }[where]
    with pytest.raises(BackendError, match=r"expected one of \('auto', 'triton', 'torch'\).*got 'tilelang'"):
        call()


def test_an_operation_refuses_an_explicit_triton():
    starts, ends = torch.zeros(2, dtype=torch.int32), torch.full((2,), 3, dtype=torch.int32)
    with pytest.raises(BackendError, match=r"vime_kernels\.topk: backend 'triton'"):
        dsa.topk(torch.zeros(2, 3), 1, starts, ends, backend="triton")


def test_explain_names_every_operation_and_shows_a_refusal(monkeypatch):
    monkeypatch.setitem(_backend.IMPLEMENTED, "kpool_select", ("torch",))
    assert [line.split(":")[0] for line in explain().splitlines()] == list(_backend.IMPLEMENTED)
    with pytest.raises(BackendError, match=r"explain: expected one of .*topk.*, got 'attention'"):
        explain("attention")
    with use_backend("triton"):
        assert explain("kpool_select").startswith("kpool_select: refused")
        with pytest.raises(BackendError, match="this release has no Triton backend for it"):
            _backend.resolve("kpool_select")
        assert "triton" in explain("topk")


def test_importing_everything_leaves_triton_alone():
    code = "import sys, vime_kernels.dsa, vime_kernels.quant, vime_kernels.mhc; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_device_that_is_too_old(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(_backend, "_warned", set())
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    reason = re.escape("the device has capability (8, 0), below (9, 0)")
    with pytest.raises(
        BackendError, match=rf"backend 'triton' was requested by the argument .*{reason}; use 'torch'"
    ):
        _backend.resolve("topk", "triton", [tensor])
    with pytest.warns(UserWarning, match=rf"topk: runs on the torch backend, because for Triton {reason}"):
        assert _backend.resolve("topk", None, [tensor]) == "torch"
    assert _backend.resolve("topk", None, [tensor]) == "torch"  # warns once


def test_tensors_of_another_device_than_the_current_one(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_backend, "_warned", set())
    here, there = (SimpleNamespace(is_cuda=True, device=torch.device("cuda", i)) for i in (0, 1))
    assert _backend.resolve("topk", None, [here]) == "triton"
    reason = "its tensors are on cuda:1 and the current device is cuda:0"
    with pytest.raises(BackendError, match=reason):
        _backend.resolve("topk", "triton", [there])
    with pytest.warns(UserWarning, match=reason):
        assert _backend.resolve("topk", None, [there]) == "torch"


def test_falling_back_is_traced_without_a_break_and_still_warns(monkeypatch):
    monkeypatch.setattr(_backend, "_machine_reason", lambda device: None)
    monkeypatch.setattr(_backend, "_warned", set())
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))

    @torch.compile(fullgraph=True, backend="eager")
    def call(x):
        return x + 1 if _backend.resolve("topk", None, [tensor], "k=5000") == "torch" else x

    with pytest.warns(
        UserWarning, match="topk: runs on the torch backend, because for Triton it does not support"
    ):
        assert call(torch.zeros(1)).item() == 1
