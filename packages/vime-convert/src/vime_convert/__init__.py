# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints to Megatron and back, bitwise, with a verifier."""

__version__ = "0.1.0"
