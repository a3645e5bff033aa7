# SPDX-License-Identifier: Apache-2.0
"""Control models: stock Megatron layers, verified with the same harness as our own models.

Qwen3 and DeepSeek-V3 are built from Megatron's own attention, MLP and MoE. When they agree with transformers, a
disagreement of one of our models is not the fault of the harness, the loader or the host modules.
"""
