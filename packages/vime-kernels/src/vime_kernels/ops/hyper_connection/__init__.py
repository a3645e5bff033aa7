# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections (mHC): n residual streams mixed around every sub-layer."""
