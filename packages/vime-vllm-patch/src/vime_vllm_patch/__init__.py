# SPDX-License-Identifier: Apache-2.0
"""vime-vllm-patch."""

__version__ = "0.1.0"
