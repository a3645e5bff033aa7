# SPDX-License-Identifier: Apache-2.0
"""Small configs, checkpoints and stand-in Megatron modules for the tests of vime-convert."""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime_convert.registry import table_for
from vime_convert.rules import RuleTable
from vime_convert.tiny import make_tiny

# Every layer kind: sliding + hash, CSA + hash, HCA, CSA.
DSV4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 2,
    "num_nextn_predict_layers": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 20,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}

CONFIGS = {cfg["model_type"]: cfg for cfg in (DSV4, QWEN3, DEEPSEEK_V3)}


def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms around 1, everything else normal."""
    values = torch.randn(shape, generator=generator)
    return 1 + 0.1 * values if name.endswith("norm.weight") else values


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The config of each known model."""
    return json.loads(json.dumps(CONFIGS[request.param]))


@pytest.fixture
def dsv4_config() -> dict[str, Any]:
    return json.loads(json.dumps(DSV4))


@pytest.fixture
def dsv4(dsv4_config: dict[str, Any]) -> RuleTable:
    return table_for(dsv4_config)


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[..., Path]:
    """`make_checkpoint(directory, config, **options)`: a seeded random checkpoint."""

    def make(directory: Path, cfg: Mapping[str, Any], **options: Any) -> Path:
        make_tiny(cfg, directory, seed=7, table=table_for(cfg), init=init, **options)
        return directory

    return make


@pytest.fixture
def release_dir(tmp_path: Path, dsv4_config: dict[str, Any], make_checkpoint: Callable[..., Path]) -> Path:
    """A DeepSeek-V4 checkpoint in release names."""
    return make_checkpoint(tmp_path / "release", dsv4_config)


@pytest.fixture
def edit() -> Callable[..., None]:
    """`edit(directory, change)`: applies `change(tensors)` to a one-file checkpoint in place."""

    def apply(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        path = directory / "model.safetensors"
        tensors = dict(load_file(path).items())
        change(tensors)
        save_file(tensors, path)

    return apply


@pytest.fixture
def load_tensors() -> Callable[[Path], dict[str, torch.Tensor]]:
    """`load_tensors(directory)`: every stored tensor of all shards."""

    def load(directory: Path) -> dict[str, torch.Tensor]:
        return {k: v for path in sorted(directory.glob("*.safetensors")) for k, v in load_file(path).items()}

    return load


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """`assert_same(a, b)`: two name → tensor mappings agree in names, dtypes, shapes and bits."""

    def check(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
        assert sorted(ours) == sorted(theirs)
        for name, a in ours.items():
            b = theirs[name]
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            assert a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)), name

    return check


class FakeLayer(torch.nn.Module):
    """A module that carries a Megatron layer number."""

    layer_number: int


@pytest.fixture
def fake_megatron() -> Callable[..., torch.nn.Module]:
    """`fake_megatron(table, …)`: nested modules that hold NaN parameters under Megatron's names.

    `grouped` chooses between the two spellings of experts; `layers` builds one pipeline stage.
    """

    def build(
        table: RuleTable,
        *,
        dtype: torch.dtype = torch.bfloat16,
        grouped: bool = False,
        layers: range | None = None,
        vocab_rows: int | None = None,
    ) -> torch.nn.Module:
        layers = layers or range(table.num_layers)
        root = torch.nn.Module()
        for bound in table.bound():
            if bound.layer is not None and bound.layer not in layers:
                continue
            rule, name = bound.rule, bound.mcore
            if bound.layer is not None:
                name = name.replace(f"layers.{bound.layer}.", f"layers.{bound.layer - layers.start}.", 1)
            if rule.num_experts and not grouped:
                head, _, tail = name.partition(".experts.")
                name = f"{head}.experts.local_experts.{bound.expert}.{tail.removesuffix(str(bound.expert))}"
            *path, leaf = name.split(".")
            module = root
            for step, part in enumerate(path):
                if not hasattr(module, part):
                    child = FakeLayer() if path[step - 1] == "layers" else torch.nn.Module()
                    if isinstance(child, FakeLayer):
                        child.layer_number = int(part) + layers.start + 1
                    module.add_module(part, child)
                module = getattr(module, part)
            shape = (vocab_rows, *rule.mcore_shape[1:]) if rule.vocab and vocab_rows else rule.mcore_shape
            wide = dtype if rule.dtype == torch.bfloat16 else rule.dtype
            if leaf in ("expert_bias", "tid2eid"):
                module.register_buffer(leaf, torch.full(shape, -1, dtype=wide))
            else:
                module.register_parameter(
                    leaf, torch.nn.Parameter(torch.full(shape, float("nan"), dtype=wide))
                )
        return root

    return build


@pytest.fixture
def seeded() -> Callable[[str], torch.Generator]:
    """`seeded(text)`: a generator that depends on the text only."""
    return lambda text: torch.Generator().manual_seed(zlib.crc32(text.encode()))
