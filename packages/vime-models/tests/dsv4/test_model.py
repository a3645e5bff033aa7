# SPDX-License-Identifier: Apache-2.0
"""The model as a whole: recomputation, frozen and float32 parameters, checkpoints, and that every part matters."""

import pytest
import torch

from vime_convert.megatron.loader import load_checkpoint
from vime_convert.reader import CheckpointReader
from vime_models.dsv4.attention import DSv4Attention
from vime_models.dsv4.hyper_connection import add_hyper_connection
from vime_models.dsv4.plugin import PLUGIN
from vime_models.dsv4.tiny import TINY_CASES
from vime_models.host import dtypes

FP32_LEAVES = ("hc_", "attn_sink", "ape")


def gradients(model, ids):
    model.train().zero_grad()
    logits = model(ids, None, None)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "options",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
    ],
    ids=["full-uniform", "full-block", "selective-moe", "selective-shared-experts"],
)
def test_recomputation_repeats_every_gradient_bit(build, options):
    ids = torch.randint(160, (1, 150), generator=torch.Generator().manual_seed(0))
    plain, recomputed = gradients(build("flash"), ids), gradients(build("flash", **options), ids)
    assert plain.keys() == recomputed.keys()
    for name, grad in plain.items():
        assert torch.equal(grad, recomputed[name]), name


def test_recomputation_uses_the_ids_of_its_own_microbatch(build):
    model = build(
        "flash", recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ).train()
    first, second = torch.arange(40)[None], torch.arange(60, 100)[None]
    alone = gradients(model, first)
    model.zero_grad()
    # As in a pipeline: the next microbatch runs forward before this one runs backward.
    logits = model(first, None, None)
    model(second, None, None)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), first[:, 1:].flatten()).backward()
    for name, grad in alone.items():
        assert torch.equal(grad, model.get_parameter(name).grad), name


def test_the_indexer_is_frozen_and_nothing_else(twin):
    model = twin("flash").ours
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert frozen == {name for name, _ in model.named_parameters() if ".indexer." in name}


def test_a_step_with_weight_decay_leaves_frozen_tensors_alone(build):
    model = build("flash")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)}
    gradients(model, torch.arange(140)[None])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.5).step()
    for name, tensor in model.state_dict().items():
        if torch.is_tensor(tensor):
            fixed = ".indexer." in name or name.endswith(("expert_bias", "tid2eid"))
            assert torch.equal(tensor, before[name]) == fixed, name


@pytest.mark.parametrize("path", ["built", "cast"])
def test_float32_parameters_survive_bfloat16(build, checkpoint, path):
    if path == "built":
        (model,) = PLUGIN.build(TINY_CASES[0].config, dtype=torch.bfloat16, device="cpu")
    else:
        model = build("flash").bfloat16()
        dtypes.enforce(model)
    reader = CheckpointReader(checkpoint("flash"))
    report = load_checkpoint([model], reader, PLUGIN.rules(TINY_CASES[0].config))
    assert not report.narrowed
    for name, parameter in model.named_parameters():
        expected = torch.float32 if name.rsplit(".", 1)[-1].startswith(FP32_LEAVES) else torch.bfloat16
        assert parameter.dtype == expected, name
    logits = PLUGIN.forward([model], torch.arange(140)[None])
    assert logits.isfinite().all()


def test_bfloat16_stays_close_to_float32(twin):
    pair = twin("pruned")
    (model,) = PLUGIN.build(pair.case.config, dtype=torch.bfloat16, device="cpu")
    load_checkpoint([model], CheckpointReader(pair.directory), pair.table)
    with torch.no_grad():
        # Rounding to 8 bits flips some picks, so only the bulk of the logits can agree.
        low, high = PLUGIN.forward([model], pair.ids).float(), pair.logits()
    assert torch.nn.functional.cosine_similarity(low.flatten(), high.flatten(), dim=0) > 0.99


def test_sharded_state_dict_names_layers_apart_and_shards_heads(twin):
    model = twin("flash").ours
    sharded = model.sharded_state_dict(prefix="")
    keys = {entry.key for entry in sharded.values()}
    for key in (
        "decoder.final_layernorm.hc_head_fn",
        "decoder.layers.0.hc_attn_fn",
        "decoder.layers.0.mlp.router.tid2eid",
        "decoder.layers.2.mlp.router.expert_bias",
        "decoder.layers.2.self_attention.attn_sink",
        "decoder.layers.2.self_attention.indexer.compressor.ape",
        "decoder.layers.3.self_attention.compressor.wkv.weight",
    ):
        assert key in keys, key
    assert not any(
        ".0.self_attention.compressor" in key or ".3.self_attention.indexer" in key for key in keys
    )
    own = {key for key, value in model.state_dict().items() if torch.is_tensor(value)}
    assert {key for key in sharded if not key.endswith("_extra_state")} == own
    by_parameter = dict(model.named_parameters())
    for leaf, axis in (("attn_sink", 0), ("wq_b.weight", 0), ("wo_a.weight", 0), ("wo_b.weight", 1)):
        parameter = by_parameter[f"decoder.layers.2.self_attention.{leaf}"]
        assert parameter.tensor_model_parallel, leaf
        assert parameter.partition_dim == axis, leaf


def test_only_stream_mixing_acts_on_sequence_shards(build):
    """With sequence parallelism a gradient is summed over tensor-parallel ranks exactly where it is partial."""
    config = build("flash").config
    config.sequence_parallel = True
    owner = torch.nn.Module()
    add_hyper_connection(owner, "hc_attn", config)
    attention = DSv4Attention(config, layer_number=1, compress_ratio=4)
    assert all(parameter.sequence_parallel for parameter in owner.parameters())
    assert not any(getattr(parameter, "sequence_parallel", False) for parameter in attention.parameters())


SUB_BLOCKS = {
    "attention": "self_attention.wo_b.weight",
    "compressor": "self_attention.compressor.wkv.weight",
    "indexer": "self_attention.indexer.linear_wq_b.weight",
    "routed experts": "mlp.experts.",
    "shared expert": "mlp.shared_experts.linear_fc2.weight",
    "attention mixing": "hc_attn_",
    "moe mixing": "hc_ffn_",
    "sink": "self_attention.attn_sink",
}


@pytest.mark.parametrize("name", [case.name for case in TINY_CASES])
def test_zeroing_any_sub_block_moves_some_logit(build, twin, name):
    """Otherwise an error in that sub-block could hide, and equality would mean little."""
    model, ids = build(name), twin(name).ids[:, :150]
    with torch.no_grad():
        correct = model(ids, None, None)
        seen = set()
        for layer in model.decoder.layers:
            for block, leaf in SUB_BLOCKS.items():
                parts = [p for n, p in layer.named_parameters() if n.startswith(leaf)]
                if not parts:
                    continue
                kept = [part.clone() for part in parts]
                for part in parts:
                    part.zero_()
                moved = (model(ids, None, None) - correct).abs().max()
                for part, value in zip(parts, kept, strict=True):
                    part.copy_(value)
                assert moved >= 1e-2, f"layer {layer.layer_number}: {block} moves logits by {moved:.1e}"
                seen.add(block)
    assert seen == set(SUB_BLOCKS)


def test_wrong_width_between_stages_is_named(twin):
    with pytest.raises(ValueError, match="layer 2 expected hc_mult · hidden_size = 256 channels, got 64"):
        twin("flash").ours.decoder.layers[1](torch.zeros(4, 1, 64))


def test_inference_is_refused(twin):
    with pytest.raises(ValueError, match="inference is not supported"):
        twin("flash").ours.decoder.layers[1](torch.zeros(4, 1, 256), inference_context=object())
