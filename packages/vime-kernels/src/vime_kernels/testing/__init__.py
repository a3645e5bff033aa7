# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of these operations and of code that calls them: comparisons with useful messages, and inputs."""

from vime_kernels.testing.compare import assert_bitwise, rel_rms
from vime_kernels.testing.inputs import causal_picks, cu_seqlens_of, randn

__all__ = ["assert_bitwise", "causal_picks", "cu_seqlens_of", "randn", "rel_rms"]
