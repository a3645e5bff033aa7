# SPDX-License-Identifier: Apache-2.0
"""The calculator against what it talks about: released sizes, models that were built, tensors that autograd kept."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_models import plan
from vime_models.cli import DIFFERENT, OK, UNUSABLE, main
from vime_models.dsv4 import sizes
from vime_models.dsv4.plugin import PLUGIN
from vime_models.dsv4.tiny import TINY_CASES

FLASH = TINY_CASES[0].config | {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
}
PRO = FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
}


def weights(hf: Any) -> list[sizes.Weight]:
    layers = [w for layer in range(hf.num_layers) for w in sizes.layer_weights(hf, layer)]
    return [*layers, *sizes.embedding_weights(hf), *sizes.head_weights(hf)]


@pytest.mark.parametrize(
    "config, total, active", [(FLASH, 284e9, 13e9), (PRO, 1.57e12, 49e9)], ids=["flash", "pro"]
)
def test_released_totals(config, total, active):
    hf = sizes.read_config(config)
    assert sum(w.elements for w in weights(hf)) == pytest.approx(total, rel=0.005)
    assert sizes.flops_per_token(hf) / 2 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("case", TINY_CASES, ids=lambda case: case.name)
def test_parameters_are_those_of_a_model(case):
    hf = sizes.read_config(case.config)
    PLUGIN.setup("cpu")
    (model,) = PLUGIN.build(case.config, dtype=torch.bfloat16, device="cpu")
    for fp32 in (False, True):
        for trained in (False, True):
            counted = sum(w.elements for w in weights(hf) if (w.fp32, w.trained) == (fp32, trained))
            built = [p for p in model.parameters() if (p.dtype is torch.float32) == fp32]
            assert counted == sum(p.numel() for p in built if p.requires_grad == trained)


SHARDS = """
import json, sys, torch, torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore
from vime_models.dsv4.plugin import PLUGIN
from vime_models.host import bringup, cpu
config, layouts = json.loads(sys.argv[1])
cpu.install()
found = []
for rank in (0, 7):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    for layout in layouts:
        parallel_state.initialize_model_parallel(
            layout.get("tp", 1),
            layout.get("pp", 1),
            expert_model_parallel_size=layout.get("ep", 1),
            expert_tensor_parallel_size=layout.get("etp", 1),
            create_gloo_process_groups=False,
        )
        (model,) = PLUGIN.build(config, dtype=torch.bfloat16, device="cpu", **layout)
        found.append(sum(p.numel() * p.element_size() for p in model.parameters()))
        parallel_state.destroy_model_parallel()
    bringup.destroy_world()
print(json.dumps(found))
"""


def test_shards_are_those_of_the_ranks():
    """The first and the last of eight ranks, built one after the other on a process group that talks to nobody."""
    config = dict(TINY_CASES[0].config)
    layouts = [{"tp": 2, "ep": 4}, {"pp": 2, "ep": 2, "etp": 2, "tp": 2}, {"ep": 8}]
    layouts = [
        layout | ({"num_layers_in_first_pipeline_stage": 3} if "pp" in layout else {}) for layout in layouts
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDS, json.dumps([config, layouts])],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    hf = sizes.read_config(config)
    for number, layout in enumerate(layouts):
        chosen = {name: value for name, value in layout.items() if name in ("tp", "pp", "ep", "etp")}
        every = plan.stages(hf, sizes, plan.Layout(8, **chosen))
        assert [found[number], found[len(layouts) + number]] == [every[0].parameters, every[-1].parameters]


def kept_bytes(config: Any, tokens: int, **options: Any) -> tuple[Any, dict[int, int]]:
    """A float32 model, and storage to bytes of what autograd keeps of one forward pass, parameters left out."""
    PLUGIN.setup("cpu")
    (model,) = PLUGIN.build(config, dtype=torch.float32, device="cpu", **options)
    init = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.05, generator=init)
    for layer in model.decoder.layers:
        if hasattr(layer.mlp.router, "tid2eid"):
            layer.mlp.router.tid2eid.copy_(torch.arange(config["num_experts_per_tok"]))
        else:
            # Balanced, which the estimate assumes.
            layer.mlp.router.expert_bias.zero_()
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)  # or a freed storage's address would be counted for another tensor
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(config["vocab_size"], (1, tokens), generator=init)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.train()(ids, None, None)
    del output
    for tensor in (*model.parameters(), *model.buffers()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sizes.read_config(config), kept


def test_full_recomputation_keeps_the_streams():
    """Of each layer its input only; the first layer's is the embedding, and the head keeps the last one's output."""
    tokens = 160
    hf, kept = kept_bytes(
        TINY_CASES[0].config,
        tokens,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    streams = hf.hc_mult * hf.hidden_size * 4 * tokens
    assert sorted(kept.values())[-hf.num_layers - 1 :] == [40960, *[streams] * hf.num_layers]
    layout = plan.Layout(1, seq_len=tokens, batch=1, bytes_per_value=4)
    (stage,) = plan.stages(hf, sizes, layout)
    # The rest is the working set of one layer, and of the loss, while it is recomputed.
    assert stage.activations > hf.num_layers * streams


@pytest.mark.parametrize(
    "layers, pp, counts",
    [
        (43, 8, [4, 6, 6, 6, 6, 6, 6, 3]),
        (61, 8, [7, 8, 8, 8, 8, 8, 8, 6]),
        (8, 4, [2, 2, 2, 2]),
        (5, 4, [2, 1, 1, 1]),
        (5, 2, [3, 2]),
        (4, 1, [4]),
    ],
)
def test_stages_are_what_two_flags_can_say(layers, pp, counts):
    assert [len(part) for part in plan.stage_layers(layers, pp)] == counts


BAD = [
    ({"tp": 3}, "--tp is 3: must divide num_attention_heads (64) and o_groups (8); nearest valid value: 2"),
    ({"pp": 64}, "--pp is 64: must be at most the number of layers (43); nearest valid value: 43"),
    ({"ep": 48}, "--ep is 48: must divide the number of experts (256); nearest valid value: 32"),
    (
        {"cp": 256},
        "--cp is 256: must divide --seq-len (16384) into at least 128 tokens; nearest valid value: 128",
    ),
    ({"gpus": 60, "tp": 8}, "--gpus is 60: must be a multiple of tp · pp · cp (8); nearest valid value: 56"),
    (
        {"batch": 100},
        "--batch is 100: must be a multiple of the data-parallel size (64); nearest valid value: 128",
    ),
]


@pytest.mark.parametrize("sizes_, message", BAD, ids=[next(iter(s)) for s, _ in BAD])
def test_a_layout_that_cannot_work_names_the_nearest_that_can(sizes_, message):
    with pytest.raises(plan.PlanError) as error:
        plan.check(sizes.read_config(FLASH), plan.Layout(**({"gpus": 64} | sizes_)))
    assert str(error.value) == f"vime_models.plan: {message}"


def test_distribution_divides_what_it_should():
    hf = sizes.read_config(FLASH)
    one = plan.stages(hf, sizes, plan.Layout(64, ep=8))[0]
    other = plan.stages(hf, sizes, plan.Layout(64, ep=16))[0]
    experts = sum(w.elements for w in weights(hf) if w.split == "ep")
    assert one.parameters - other.parameters == experts * 2 / 16
    assert one.optimizer == pytest.approx(other.optimizer, rel=1e-12)
    assert plan.stages(hf, sizes, plan.Layout(64))[0].sent["tp"] == 0
    wider = [plan.stages(hf, sizes, plan.Layout(64, cp=cp))[0] for cp in (1, 4)]
    assert wider[1].activations == wider[0].activations / 4
    # As many microbatches again on each rank, each of a quarter of the tokens.
    assert wider[1].sent["cp"] > wider[0].sent["cp"] == 0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    return tmp_path


def test_command_line_chooses_what_fits(checkpoint, capsys):
    assert (
        main(["plan", "--hf", str(checkpoint), "--gpus", "64", "--tp", "8", "--pp", "8", "--cp", "1"]) == OK
    )
    out = capsys.readouterr().out
    assert out.startswith("tp 8  pp 8  ep ")
    assert "--decoder-first-pipeline-num-layers 4\n--decoder-last-pipeline-num-layers 3\n" in out
    assert "GB sent per rank and step" in out


def test_command_line_says_what_does_not_fit(checkpoint, capsys):
    words = ["plan", "--hf", str(checkpoint), "--gpus", "8", "--tp", "8", "--pp", "1"]
    assert main(words) == UNUSABLE
    assert "no layout of 8 GPUs with the given sizes fits into 125 GB" in capsys.readouterr().err
    assert main([*words, "--cp", "1", "--ep", "8", "--recompute", "full"]) == DIFFERENT
    assert "the fullest rank needs" in capsys.readouterr().err
    assert main(["plan", "--hf", str(checkpoint), "--gpus", "64", "--tp", "3"]) == UNUSABLE
    assert "--tp is 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word, value", [("--gpus", "0"), ("--seq-len", "-1"), ("--batch", "many"), ("--memory-gb", "nan")]
)
def test_command_line_refuses_sizes_that_are_none(checkpoint, capsys, word, value):
    words = ["plan", "--hf", str(checkpoint), "--gpus", "8", word, value]
    with pytest.raises(SystemExit, match="2"):
        main(words)
    error = capsys.readouterr().err
    assert f"argument {word}: expected" in error
    assert repr(value) in error
