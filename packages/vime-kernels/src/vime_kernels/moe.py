# SPDX-License-Identifier: Apache-2.0
"""Operations inside an expert, and the sum of what a token's experts return."""

from vime_kernels.ops.gather_sum.interface import gather_sum
from vime_kernels.ops.swiglu.interface import swiglu

__all__ = ["gather_sum", "swiglu"]
