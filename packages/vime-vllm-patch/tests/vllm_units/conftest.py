# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: TID251
"""Runs in vLLM's environment, a patched tree first on PYTHONPATH (`nox -s patch_check`); elsewhere collects nothing.

The rig joins the real scheduler, the real worker connector with its store, the real capturer and the real output
processor. Only the model is missing: in its place stand picks that say which token and layer they belong to.
"""

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

BLOCK = 16
TOPK = 8
LAYERS = [1, 3]
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "o_groups": 2,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "sliding_window": 128,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "swiglu_limit": 10.0,
    "expert_dtype": "fp8",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session", autouse=True)
def cpu_platform() -> None:
    """A CUDA wheel on a machine without a device has no platform; vLLM asks for it when modules are imported."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    class Platform(CpuPlatform):
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            """Leaves the configuration as asked; on CPUs without AMX it would turn prefix caching off."""

    vllm.platforms._current_platform = Platform()

    import vllm.config.vllm

    # No kernel runs here, but Model Runner V2, which alone has the channel, is refused without Triton.
    vllm.config.vllm.HAS_TRITON = True


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="session")
def engine_config(model: Path) -> Callable[..., Any]:
    """Makes vLLM's configuration from engine arguments."""

    def make(**options: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        arguments = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "enable_return_indexer_topk": True,
            "async_scheduling": False,
        }
        return EngineArgs(**arguments | options).create_engine_config()

    return make


def pick(position: int, layer: int) -> list[int]:
    """Picks that no other token or layer has, in no order, with unused slots between them."""
    found = [(position * 31 + layer * 7 + slot * 1000) % 60000 for slot in range(TOPK)]
    return [value if slot < (position + 1) // 4 else -1 for slot, value in enumerate(found)][::-1]


def rows(tokens: int, start: int = 0) -> Any:
    """What a request with this many tokens must get."""
    import numpy as np

    wanted = [[pick(at, layer) for layer in LAYERS] for at in range(start, tokens - 1)]
    return np.array(wanted, np.int32).reshape(-1, len(LAYERS), TOPK)


class Rig:
    """A scheduler and a worker's data plane; `run` steps until all requests are finished."""

    def __init__(self, config: Any, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch
        from vllm.distributed.aux_output_connector import worker
        from vllm.model_executor.layers.indexer_topk_capturer import IndexerTopkCapturer
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK)
        monkeypatch.setattr(worker, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))
        monkeypatch.setattr(worker, "resolve_kv_cache_block_sizes", lambda *_: (BLOCK, BLOCK))
        tokens = config.scheduler_config.max_num_batched_tokens
        self.capturer = IndexerTopkCapturer(tokens, len(LAYERS), TOPK, True, torch.device("cpu"))
        self.experts = None
        if config.aux_output_config.enable_return_routed_experts:
            self.experts = FakeExperts(tokens)
            monkeypatch.setattr(worker, "RoutedExpertsCapturer", lambda **_: self.experts)
            monkeypatch.setattr(worker, "bind_routed_experts_capturer", lambda *_: None)
        self.worker = worker.get_aux_output_connector(torch.nn.Module(), config, cache, self.capturer)
        self.outputs = OutputProcessor(None, log_stats=False)
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(BLOCK, hash_fn)
        self.finished: dict[str, Any] = {}
        self.preempted = 0
        self.computed: dict[str, list[tuple[int, int]]] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = 4, **options: Any) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **options)
        request = EngineCoreRequest(name, prompt, None, params, None, 0.0, None, None, None)
        request.external_req_id = name
        self.outputs.add_request(request, None)
        self.scheduler.add_request(Request.from_engine_core_request(request, self.hasher))

    def step(self) -> None:
        import numpy as np
        from vllm.v1.outputs import ModelRunnerOutput

        planned = self.scheduler.schedule()
        self.worker.begin_step(planned.aux_output_connector_metadata)
        names = list(planned.num_scheduled_tokens)
        self.preempted += len(planned.preempted_req_ids or ())
        if not names:
            self.take(planned, ModelRunnerOutput([], {}))
            return
        counts = [planned.num_scheduled_tokens[name] for name in names]
        requests = [self.scheduler.requests[name] for name in names]
        starts = [
            request.num_computed_tokens - count for request, count in zip(requests, counts, strict=True)
        ]
        positions = [start + at for start, count in zip(starts, counts, strict=True) for at in range(count)]
        for name, start, count in zip(names, starts, counts, strict=True):
            self.computed.setdefault(name, []).append((start, count))
        self.capture(positions)
        batch = SimpleNamespace(
            req_ids=names,
            query_start_loc_np=np.cumsum([0, *counts]),
            num_computed_tokens_np=np.array(starts),
        )
        # A request samples when its last known token was computed.
        samples = [
            start + count == request.num_tokens
            for request, start, count in zip(requests, starts, counts, strict=True)
        ]
        pending = self.worker.prepare_output(batch)
        pending.enqueue_cpu_copy(np.array(samples, int), np.zeros(len(names), int))
        self.capturer.device_buffer.fill_(7)  # the next step overwrites it before the copy is read
        sampled = [
            [500 + request.num_tokens % 100] if yes else []
            for request, yes in zip(requests, samples, strict=True)
        ]
        order = {name: at for at, name in enumerate(names)}
        output = ModelRunnerOutput(
            names, order, sampled, aux_output_connector_output=pending.process_output()
        )
        self.take(planned, output)

    def capture(self, positions: list[int]) -> None:
        """What the model's layers do in a step."""
        import torch

        for stream, layer in enumerate(LAYERS):
            # Kernels may make rows wider than index_topk.
            wide = [[*pick(at, layer), 12345] for at in positions]
            self.capturer.capture(stream, torch.tensor(wide, dtype=torch.int32))
        if self.experts is not None:
            self.experts.fill(positions)

    def take(self, planned: Any, output: Any) -> None:
        for result in self.scheduler.update_from_output(planned, output).values():
            processed = self.outputs.process_outputs(result.outputs)
            for request in processed.request_outputs:
                if request.finished:
                    self.finished[request.request_id] = request.outputs[0]

    def run(self) -> dict[str, Any]:
        for _ in range(400):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        return self.finished


class FakeExperts:
    """A routed-experts capturer whose rows, of an odd number of bytes, say which token they belong to."""

    shape_per_token = (3, 1)
    output_dtype_name = "uint8"

    def __init__(self, tokens: int) -> None:
        import torch

        self.buffer = torch.zeros(tokens, 3, 1, dtype=torch.uint8)

    def fill(self, positions: list[int]) -> None:
        import torch

        values = torch.tensor([[at % 251, at % 13, 9] for at in positions], dtype=torch.uint8)
        self.buffer[: len(positions)] = values[..., None]

    def snapshot_routing_data(self, count: int) -> Any:
        return self.buffer[:count].clone()


@pytest.fixture
def rig(engine_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Makes rigs and closes their stores."""
    made: list[Rig] = []

    def make(num_blocks: int = 200, **options: Any) -> Rig:
        made.append(Rig(engine_config(**options), num_blocks, monkeypatch))
        return made[-1]

    yield make
    for one in made:
        one.worker.close()


@pytest.fixture
def wanted() -> Callable[..., Any]:
    return rows
