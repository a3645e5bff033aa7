# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: TID251 - runs inside vLLM only
"""Prints, as JSON, what vLLM's configuration answers to --enable-return-indexer-topk.

Arguments: directories of a DeepSeek-V4 and of a dense model. `starts` has an answer for each setting, `layers` the
layers that own an indexer by the config of each family.
"""

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.indexer_topk import get_indexer_layer_ids

STARTS: dict[str, dict[str, Any]] = {
    "no-indexer": {"model": sys.argv[2], "tokenizer": sys.argv[1]},
    "pipeline": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    "context": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    | {"distributed_executor_backend": "mp"},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "kv-connector": {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
    "rust": {},
    "rocm": {},
    "xpu": {},
    "nothing": {},
}
PATCHES = {
    "rust": lambda: mock.patch.dict("os.environ", VLLM_USE_RUST_FRONTEND="1"),
    "rocm": lambda: mock.patch.object(type(current_platform), "is_rocm", return_value=True),
    "xpu": lambda: mock.patch.object(type(current_platform), "is_xpu", return_value=True),
}
SHARED = {"model_type": "glm_moe_dsa", "num_hidden_layers": 12, "index_topk": 2048}
LAYERS: dict[str, dict[str, Any]] = {
    "v3.2": {"model_type": "deepseek_v32", "num_hidden_layers": 4, "index_topk": 2048},
    "v4": {"model_type": "deepseek_v4", "num_hidden_layers": 5, "index_topk": 512}
    | {"compress_ratios": [0, 0, 4, 128, 4, 4]},
    "v4.1": {"model_type": "deepseek_v41", "num_hidden_layers": 8, "index_topk": 512}
    | {"index_source_layer_ids": [5, 2, 9]},
    "frequency": SHARED | {"index_topk_freq": 4},
    "offset": SHARED | {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    "pattern": SHARED | {"index_topk_pattern": "FSSFSSFSSFSS"},
    "types-agree": SHARED
    | {"index_topk_freq": 4, "indexer_types": ["full", "full", *["shared"] * 3] * 2}
    | {"num_hidden_layers": 5},
    "types-disagree": SHARED | {"indexer_types": ["full"] * 11 + ["shared"]},
    "unknown": SHARED | {"model_type": "hy_v4"},
    "dense": {"model_type": "qwen3", "num_hidden_layers": 4},
}


def start(name: str) -> str:
    """`accepted`, or the message of the refusal."""
    options = {"model": sys.argv[1], "max_model_len": 4096, "enforce_eager": True}
    with contextlib.ExitStack() as stack:
        try:
            args = EngineArgs(**options | STARTS[name], enable_return_indexer_topk=True)
            if name in PATCHES:
                stack.enter_context(PATCHES[name]())
            args.create_engine_config()
        except Exception as error:
            return str(error)
    return "accepted"


def layers(name: str) -> list[int] | str:
    """Layer ids, or the message of the refusal."""
    try:
        return get_indexer_layer_ids(SimpleNamespace(**LAYERS[name]))
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    answers = {"starts": {n: start(n) for n in STARTS}, "layers": {n: layers(n) for n in LAYERS}}
    print(json.dumps(answers))
