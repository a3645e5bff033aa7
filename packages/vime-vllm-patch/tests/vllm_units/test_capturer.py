# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: TID251
"""Which layers are captured, what is captured, and when: between a layer's indexer and its attention."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

TOKENS, TOPK = 6, 4


def config(model_type: str, layers: int, **other: Any) -> SimpleNamespace:
    return SimpleNamespace(model_type=model_type, num_hidden_layers=layers, index_topk=TOPK, **other)


RULES = {
    "v4": (config("deepseek_v4", 5, compress_ratios=[128, 128, 4, 128, 4, 4]), [2, 4]),
    "v4_names": (
        config(
            "deepseek_v4",
            4,
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
            layer_types=[
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            num_nextn_predict_layers=1,
        ),
        [1, 3],
    ),
    "v41": (config("deepseek_v41", 9, index_source_layer_ids=[2, 5, 8, 9]), [2, 5, 8]),
    "v32": (config("deepseek_v32", 61), list(range(61))),
    "glm_5_2": (config("glm_moe_dsa", 78, index_topk_freq=4), [0, *range(1, 78, 4)]),
    "glm_pattern": (config("glm_moe_dsa", 6, index_topk_pattern="FSSF"), [0, 3, 4, 5]),
}


@pytest.mark.parametrize("hf, layers", RULES.values(), ids=RULES.keys())
def test_the_layers_that_own_an_indexer(hf: SimpleNamespace, layers: list[int]) -> None:
    from vllm.utils import indexer_topk

    if hasattr(hf, "layer_types") and not hasattr(indexer_topk, "get_compress_ratios"):
        pytest.skip("vLLM 0.32 reads compress_ratios only")
    assert indexer_topk.get_indexer_layer_ids(hf) == layers


@pytest.mark.parametrize(
    "hf, message",
    [
        (SimpleNamespace(model_type="qwen3", num_hidden_layers=4), "no index_topk"),
        (config("hy_v4", 4), "does not support"),
        (config("glm_moe_dsa", 3, indexer_types=["full", "shared", "full"]), "disagrees with itself"),
    ],
    ids=["no_indexer", "unknown", "contradiction"],
)
def test_other_models_are_refused(hf: SimpleNamespace, message: str) -> None:
    from vllm.utils.indexer_topk import get_indexer_layer_ids

    with pytest.raises(ValueError, match=message):
        get_indexer_layer_ids(hf)


class Attention(torch.nn.Module):
    """What the binder sees of an attention layer."""

    indexer_topk_capture_fn = None

    def __init__(self, owns: bool, ratio: int = 4) -> None:
        super().__init__()
        self.indexer = torch.nn.Identity() if owns else None
        self.compress_ratio = ratio


def model(owners: list[int], layers: int) -> torch.nn.Module:
    root = torch.nn.Module()
    root.layers = torch.nn.ModuleList()
    for layer in range(layers):
        block = torch.nn.Module()
        block.attn = Attention(layer in owners)
        root.layers.append(block)
    return root


def served(hf: SimpleNamespace, max_model_len: int = 4096) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=hf, max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
    )


@pytest.mark.parametrize("length, dtype", [(4096, "uint16"), (4 * 65535, "int32")], ids=["narrow", "wide"])
def test_bound_layers_write_their_own_stream(length: int, dtype: str) -> None:
    from vllm.model_executor.layers.indexer_topk_capturer import bind_indexer_topk_capturer
    from vllm.utils.indexer_topk import widen_picks

    hf = config("deepseek_v4", 4, compress_ratios=[0, 4, 128, 4, 4])
    root = model([1, 3, 4], 5)  # layer 4 is a draft layer
    capturer = bind_indexer_topk_capturer(root, served(hf, length), torch.device("cpu"))
    assert (capturer.dtype_name, capturer.shape_per_token) == (dtype, (2, TOPK))
    assert root.layers[4].attn.indexer_topk_capture_fn is None
    where = capturer.device_buffer.data_ptr()
    for layer in (3, 1):
        picks = torch.tensor([[layer * 100 + slot, -1, 65534 // 4, 3, 99, 99] for slot in range(3)]).int()
        root.layers[layer].attn.indexer_topk_capture_fn(picks)
    assert capturer.device_buffer.data_ptr() == where
    found = widen_picks(capturer.device_buffer[:3].numpy())
    for stream, layer in enumerate((1, 3)):
        assert found[:, stream].tolist() == [[layer * 100 + slot, -1, 65534 // 4, 3] for slot in range(3)]


@pytest.mark.parametrize("owners", [[], [1], [1, 2, 3]], ids=["none", "one_missing", "one_more"])
def test_a_model_that_differs_from_its_config_is_refused(owners: list[int]) -> None:
    from vllm.model_executor.layers.indexer_topk_capturer import bind_indexer_topk_capturer

    hf = config("deepseek_v4", 4, compress_ratios=[0, 4, 128, 4])
    with pytest.raises(ValueError, match=r"the config names indexers on layers \[1, 3\]"):
        bind_indexer_topk_capturer(model(owners, 4), served(hf), torch.device("cpu"))


class Stop(Exception):
    """Raised where the attention starts."""


def v4_like(cls: type, method: Any) -> list[Any]:
    """Runs the method of a layer whose indexer writes the shared buffer and whose attention overwrites it."""
    buffer = torch.zeros(TOKENS, TOPK, dtype=torch.int32)
    seen: list[Any] = []

    def indexer_op(*_: Any) -> None:
        buffer.fill_(5)

    def forward_mqa(*_: Any) -> None:
        buffer.fill_(9)

    layer = SimpleNamespace(
        indexer=SimpleNamespace(indexer_op=indexer_op),
        topk_indices_buffer=buffer,
        indexer_topk_capture_fn=lambda picks: seen.append(picks.clone()),
        forward_mqa=forward_mqa,
    )
    q = torch.zeros(3, 1)
    method(layer, q, q, None, q, q, q, q, q)
    # The indexer is shared by short contexts: without a query for it the buffer is filled elsewhere, and captured too.
    method(layer, q, None, None, None, q, q, q, q)
    return seen


def v32(cls: type, method: Any) -> list[Any]:
    import sys

    module = sys.modules[cls.__module__]
    buffer = torch.zeros(TOKENS, TOPK, dtype=torch.int32)
    seen: list[Any] = []
    before = module.sparse_attn_indexer
    module.sparse_attn_indexer = lambda *_, **options: buffer.fill_(5)

    def ready() -> None:
        buffer.fill_(9)
        raise Stop

    names = ("quant_block_size", "scale_fmt", "topk_tokens", "head_dim", "max_model_len", "max_total_seq_len")
    indexer = SimpleNamespace(
        **dict.fromkeys(names, 1),
        k_cache=SimpleNamespace(prefix="", kv_cache=None),
        indexer_op=SimpleNamespace(topk_backend="auto"),
    )
    parallel = SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1)
    layer = SimpleNamespace(
        indexer=indexer,
        skip_topk=False,
        use_pcp=False,
        pcp_shard_decode_requests=False,
        dcp_manager=None,
        _dense_mha_metadata_layer_name="",
        _vllm_config=SimpleNamespace(parallel_config=parallel),
        topk_indices_buffer=buffer,
        indexer_topk_capture_fn=lambda picks: seen.append(picks.clone()),
        impl=SimpleNamespace(record_logical_topk_ready=ready),
    )
    q = torch.zeros(3, 1)
    try:
        for _ in range(2):
            with suppress(Stop):
                method(layer, q, q, q, q, q, q, q, q, q, q, q, q)
    finally:
        module.sparse_attn_indexer = before
    return seen


HOOKS = {
    "v4": ("vllm.models.deepseek_v4.attention", "DeepseekV4Attention", v4_like),
    "v4_cpu": ("vllm.models.deepseek_v4.cpu.cpu_sparse", "DeepseekV4CPUAttention", v4_like),
    "v41": ("vllm.models.deepseek_v41.attention", "DeepseekV4Attention", v4_like),
    "v32": ("vllm.models.deepseek_v32.attention", "DeepseekV32Attention", v32),
}


@pytest.mark.parametrize("module, name, drive", HOOKS.values(), ids=HOOKS.keys())
def test_the_copy_is_made_after_the_indexer_and_before_the_attention(
    module: str, name: str, drive: Callable[..., list[Any]]
) -> None:
    from importlib import import_module

    cls = getattr(import_module(module), name)
    assert cls.indexer_topk_capture_fn is None
    method = cls._sparse_indexer_and_attn
    first, second = drive(cls, getattr(method, "__wrapped__", method))
    assert first.shape == (3, TOPK)
    assert (first == 5).all()
    assert second.shape == (3, TOPK)


def test_dense_prefill_still_scores() -> None:
    from vllm.model_executor.layers.indexer_topk_capturer import bind_indexer_topk_capturer

    root = model([0, 1], 2)
    for block in root.layers:
        block.attn._dense_mha_metadata_layer_name = "layers.0.attn"
    bind_indexer_topk_capturer(root, served(config("deepseek_v32", 2)), torch.device("cpu"))
    assert [block.attn._dense_mha_metadata_layer_name for block in root.layers] == ["", ""]
