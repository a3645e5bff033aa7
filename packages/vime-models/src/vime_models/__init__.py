# SPDX-License-Identifier: Apache-2.0
"""vime-models: Megatron plugins that train DeepSeek-V4 (and the host adaptations that they share)."""

__version__ = "0.1.0"
