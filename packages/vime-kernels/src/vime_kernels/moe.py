# SPDX-License-Identifier: Apache-2.0
"""Operations inside an expert."""

from vime_kernels.ops.swiglu.interface import swiglu

__all__ = ["swiglu"]
