# SPDX-License-Identifier: Apache-2.0
"""The compiler half: concrete, and never reached under the interpreter."""

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class CPUBackend(BaseBackend):
    """Accepts the `cpu` target and adds no compilation stage."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def add_stages(self, stages: dict, options: object, language: object = None) -> None:
        return None

    def load_dialects(self, context: object) -> None:
        return None

    def get_module_map(self) -> dict[str, Any]:
        return {}
