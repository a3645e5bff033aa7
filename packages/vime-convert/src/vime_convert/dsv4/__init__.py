# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4: its Hugging Face config, its tensor names in four dialects, and its Megatron names."""
