# SPDX-License-Identifier: Apache-2.0
"""Between release tensors and a Megatron model: canonical names, shards, loader, exporter."""
