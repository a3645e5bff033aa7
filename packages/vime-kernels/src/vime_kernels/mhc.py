# SPDX-License-Identifier: Apache-2.0
"""Hyper-connection operations of DeepSeek-V4 (mHC)."""

from vime_kernels.ops.hyper_connection.interface import mhc_head, mhc_mixes, mhc_post, mhc_pre, sinkhorn

__all__ = ["mhc_head", "mhc_mixes", "mhc_post", "mhc_pre", "sinkhorn"]
