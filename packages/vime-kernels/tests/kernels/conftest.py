# SPDX-License-Identifier: Apache-2.0
"""Triton kernel tests run on a CUDA device and, from `test_interpreter.py`, in Triton's interpreter on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

# Test modules import the modules beside them by name.
sys.path.insert(0, str(Path(__file__).parent))

from proof_cases import CASES, Case
from proof_inputs import INTERPRETING


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """Where the tensors live: "cpu" under TRITON_INTERPRET=1, else "cuda"."""
    if request.param == "interpreter":
        if not INTERPRETING:
            pytest.skip("TRITON_INTERPRET=1 is set by test_interpreter.py only")
        return "cpu"
    if INTERPRETING:
        pytest.skip("compiled kernels need TRITON_INTERPRET unset")
    return "cuda"


@pytest.fixture(params=CASES)
def case(request) -> Case:
    """One operation of the table, with the same tensors in every test."""
    torch.manual_seed(0)
    return CASES[request.param]
