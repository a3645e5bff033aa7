# SPDX-License-Identifier: Apache-2.0
"""Quantisation simulated in training (QAT), and the Hadamard rotation before it."""

from vime_kernels.ops.fake_quant.interface import act_quant, fake_quant_fp4, fake_quant_fp8, hadamard

__all__ = ["act_quant", "fake_quant_fp4", "fake_quant_fp8", "hadamard"]
