# SPDX-License-Identifier: Apache-2.0
"""The verifier finds what it is there to find: each planted bug must turn the named check red.

A bug is either patched into a module before the model is built, or done to the built and loaded model. Reference
traces are computed once; a bug costs one forward pass.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_convert.megatron import exporter, loader
from vime_convert.tiny import make_tiny
from vime_convert.verify.compare import Check, Trace, compare_forward, compare_gradients
from vime_convert.verify.precision import PRECISIONS
from vime_convert.verify.roundtrip import check_round_trips
from vime_convert.verify.runs import Candidate, Reference, draw_ids
from vime_models.dsv4 import attention, compressor, head, hyper_connection, moe
from vime_models.dsv4.plugin import PLUGIN
from vime_models.dsv4.thd import TokenLayout

pytestmark = [
    pytest.mark.mutation,
    pytest.mark.filterwarnings("ignore"),
]  # warnings of the host are not the subject

STRICT, STORAGE = PRECISIONS["float64"], PRECISIONS["float32"]
Patch = Callable[[pytest.MonkeyPatch], None]
Damage = Callable[[torch.nn.Module], None]


@dataclass
class Prepared:
    """A tiny checkpoint with the reference's answer."""

    config: dict[str, Any]
    directory: Path
    ids: torch.Tensor
    expected: Trace


@pytest.fixture(scope="session")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Prepared]:
    PLUGIN.setup("cpu")
    done: dict[str, Prepared] = {}

    def prepared(name: str) -> Prepared:
        if name not in done:
            case = next(case for case in PLUGIN.tiny_cases if case.name == name)
            directory = tmp_path_factory.mktemp("checkpoints") / name
            make_tiny(case.config, directory, seed=1, plugin=PLUGIN)
            reference = Reference(directory, STRICT, "cpu", PLUGIN.rules(case.config))
            ids = draw_ids(reference, case.config["vocab_size"], case.seq_len, seed=1)
            done[name] = Prepared(dict(case.config), directory, ids, reference.run(ids, gradients=True))
        return done[name]

    return prepared


def outcome(prepared: Prepared, damage: Damage | None = None, *, gradients: bool = False) -> dict[str, Check]:
    """The checks of our model against the reference, after optional damage to the loaded model."""
    candidate = Candidate(PLUGIN, prepared.config, prepared.directory, STRICT, "cpu")
    if damage is not None:
        with torch.no_grad():
            damage(candidate.chunks[0])
    ours = candidate.run(prepared.ids, gradients=gradients)
    checks, _ = compare_forward(ours, prepared.expected, STRICT)
    if gradients:
        checks += compare_gradients(ours, prepared.expected, STRICT)
    return {check.name.partition("[")[0]: check for check in checks}


def wrap(module: Any, name: str, change: Callable[..., Any]) -> Patch:
    """A patch that replaces `module.name` by `change(original, *args, **kwargs)`."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: change(original, *args, **kwargs))

    return patch


def swap_halves(
    pool: Any, x: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Feeds the previous group's half as the own group's and the other way round."""
    if kwargs["overlap"]:
        x, score, ape = (t.roll(t.shape[-1] // 2, -1) for t in (x, score, ape))
    return pool(x, score, ape, *args, **kwargs)


def one_entry_too_early(visible: Any, self: TokenLayout, ratio: int) -> Any:
    """An entry becomes visible one token before its group is complete."""
    starts, ends = visible(self, ratio)
    positions = self.positions.to(ends.dtype)
    return starts, starts + (positions + 2) // ratio


def forget_inverse_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.rotate

    def rotate(x: torch.Tensor, *args: Any, inverse: bool = False, **kwargs: Any) -> torch.Tensor:
        return x if inverse else original(x, *args, **kwargs)

    monkeypatch.setattr(attention, "rotate", rotate)


def layers(model: torch.nn.Module) -> Any:
    return model.decoder.layers


def swap_rope_bases(model: torch.nn.Module) -> None:
    plain, scaled = layers(model)[0].self_attention, layers(model)[2].self_attention
    plain.rope, scaled.rope = scaled.rope, plain.rope


def yarn_on_sliding_layers(model: torch.nn.Module) -> None:
    layer = layers(model)[0].self_attention
    layer.rope = replace(layer.rope, yarn=layers(model)[2].self_attention.rope.yarn)


def unclamp(part: str) -> Damage:
    def damage(model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if name.endswith(part) and hasattr(module, "config"):
                module.config = copy.copy(module.config)
                module.config.activation_func_clamp_value = None

    return damage


def permute_experts(model: torch.nn.Module) -> None:
    experts = layers(model)[3].mlp.experts.local_experts
    for ours, theirs in zip(experts[0].parameters(), experts[1].parameters(), strict=True):
        kept = ours.clone()
        ours.copy_(theirs)
        theirs.copy_(kept)


def widen_window(model: torch.nn.Module) -> None:
    layers(model)[0].self_attention.window += 1


def pick_one_less(model: torch.nn.Module) -> None:
    layers(model)[2].self_attention.indexer.topk -= 1


def perturb_one_scale(model: torch.nn.Module) -> None:
    layers(model)[1].hc_attn_scale[2] += 1e-6


FORWARD_PATCHES: dict[str, tuple[str, Patch]] = {
    "comb-transposed": (
        "flash",
        wrap(
            hyper_connection,
            "mhc_post",
            lambda f, y, X, post, comb, **kw: f(y, X, post, comb.transpose(-1, -2).contiguous(), **kw),
        ),
    ),
    "overlap-halves-swapped": ("flash", wrap(compressor, "gated_pool", swap_halves)),
    "visibility-off-by-one": ("flash", wrap(TokenLayout, "visible", one_entry_too_early)),
    "sink-dropped": (
        "flash",
        wrap(
            attention,
            "sparse_attention_v4",
            lambda f, q, kv, entries, scale, sink, **kw: f(q, kv, entries, scale, sink - 1e4, **kw),
        ),
    ),
    "gate-and-up-swapped": (
        "flash",
        wrap(loader, "to_mcore", lambda f, rule, tensors: f(rule, tensors[::-1])),
    ),
    "head-without-eps": (
        "large-eps",
        wrap(head, "mhc_head", lambda f, *args, **kw: f(*args, **(kw | {"eps": 0.0}))),
    ),
    "epsilons-exchanged": (
        "large-eps",
        wrap(
            hyper_connection,
            "mhc_mixes",
            lambda f, *args, **kw: f(*args, **(kw | {"eps": kw["norm_eps"], "norm_eps": kw["eps"]})),
        ),
    ),
    "query-norm-dropped": (
        "flash",
        wrap(attention, "rotate", lambda f, *a, **k: f(*a, **k | {"norm_eps": None})),
    ),
    "inverse-rotation-dropped": ("flash", forget_inverse_rotation),
    "bias-in-the-weights": (
        "flash",
        wrap(
            moe.ScoreRouter,
            "combine_weights",
            lambda f, self, scores, picks: f(self, scores + getattr(self, "expert_bias", 0), picks),
        ),
    ),
}

FORWARD_DAMAGE: dict[str, tuple[str, Damage]] = {
    "rope-base-swapped": ("flash", swap_rope_bases),
    "yarn-on-wrong-layers": ("flash", yarn_on_sliding_layers),
    "routed-clamp-missing": ("flash", unclamp("mlp.experts")),
    "shared-clamp-missing": ("flash", unclamp("shared_experts")),
    "experts-permuted": ("flash", permute_experts),
    "window-off-by-one": ("flash", widen_window),
    "one-pick-less": ("flash", pick_one_less),
    "one-scale-off-by-1e-6": ("flash", perturb_one_scale),
}


@pytest.mark.parametrize("case", ["flash", "large-eps"])
def test_without_a_bug_everything_is_green(prepare: Callable[[str], Prepared], case: str) -> None:
    checks = outcome(prepare(case), gradients=True)
    assert all(check.ok for check in checks.values()), checks


@pytest.mark.parametrize("bug", FORWARD_PATCHES)
def test_patched_bug_turns_the_logits_red(
    bug: str, prepare: Callable[[str], Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, patch = FORWARD_PATCHES[bug]
    prepared = prepare(case)
    patch(monkeypatch)
    checks = outcome(prepared)
    assert not checks["logits"].ok, f"{bug} went unnoticed: {checks}"
    assert not checks["streams"].ok or bug == "head-without-eps", checks


@pytest.mark.parametrize("bug", FORWARD_DAMAGE)
def test_damaged_model_turns_the_logits_red(bug: str, prepare: Callable[[str], Prepared]) -> None:
    case, damage = FORWARD_DAMAGE[bug]
    checks = outcome(prepare(case), damage)
    assert not checks["logits"].ok, f"{bug} went unnoticed: {checks}"
    assert not checks["streams"].ok, checks


def test_a_cut_gradient_turns_only_the_gradients_red(
    prepare: Callable[[str], Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare("flash")
    wrap(attention.DSv4Attention, "_shared", lambda f, self, keys: f(self, keys).detach())(monkeypatch)
    checks = outcome(prepared, gradients=True)
    assert checks["logits"].ok
    assert checks["streams"].ok
    assert not checks["gradients"].ok or not checks["gradient-names"].ok, checks


def test_first_differing_layer_is_the_damaged_one(prepare: Callable[[str], Prepared]) -> None:
    checks = outcome(prepare("flash"), permute_experts)
    assert checks["streams"].detail == "first layer that differs: 3"


def _drop(export: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return (item for item in export(*args, **kwargs) if item[0] != "layers.1.attn.attn_sink")


def _narrow(export: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in export(*args, **kwargs):
        yield name, tensor.to(torch.int32) if name.endswith("tid2eid") else tensor


def _flip(export: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in export(*args, **kwargs):
        if name == "layers.2.attn.wkv.weight":
            tensor = tensor.clone()
            tensor.view(-1).view(torch.int16)[0] ^= 1
        yield name, tensor


@pytest.mark.parametrize(
    "change, message",
    [
        (_drop, "layers.1.attn.attn_sink is missing"),
        (_narrow, "layers.0.ffn.gate.tid2eid is torch.int32"),
        (_flip, "layers.2.attn.wkv.weight differs in 1 of"),
    ],
    ids=["tensor-dropped-in-export", "hash-table-cast-down", "one-bit-flipped"],
)
def test_export_bug_turns_the_round_trip_red(
    change: Any,
    message: str,
    prepare: Callable[[str], Prepared],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    prepared = prepare("flash")
    candidate = Candidate(PLUGIN, prepared.config, prepared.directory, STORAGE, "cpu")
    wrap(exporter, "export_tensors", change)(monkeypatch)
    release, *others = check_round_trips(candidate, prepared.directory, tmp_path)
    assert not release.ok
    assert message in release.detail
    assert not any(check.ok for check in others)
