# SPDX-License-Identifier: Apache-2.0
"""Triton kernel tests run on a CUDA device and, from `test_interpreter.py`, in Triton's interpreter on the CPU."""

import os

import pytest


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the tensors live: "cpu" under TRITON_INTERPRET=1, else "cuda"."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if request.param == "interpreter":
        if not interpreting:
            pytest.skip("TRITON_INTERPRET=1 is set by test_interpreter.py only")
        return "cpu"
    if interpreting:
        pytest.skip("compiled kernels need TRITON_INTERPRET unset")
    return "cuda"
