# SPDX-License-Identifier: Apache-2.0
"""The driver half: always active, device `cpu`."""

import time
from collections.abc import Callable

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    """Answers what Triton asks before it interprets a kernel."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable:
        def benchmark(kernel: Callable, **_: object) -> list[float]:
            start = time.perf_counter()
            kernel()
            return [1e3 * (time.perf_counter() - start)]

        return benchmark
