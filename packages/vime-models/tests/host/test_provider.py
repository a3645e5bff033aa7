# SPDX-License-Identifier: Apache-2.0
"""`--spec`: what it may name, how it is called, what the errors say; and the model that comes out."""

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_models.host import provider


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "needs_something.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("tiny_spec", None)


def _args(name: str = "get_spec", **changes: Any) -> Namespace:
    values = {
        "spec": ["tiny_spec", name],
        "padded_vocab_size": 32,
        "max_position_embeddings": 64,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "use_rope_scaling": False,
    }
    return Namespace(**(values | changes))


@pytest.mark.parametrize(
    "spec, error, message",
    [
        (["tiny_spec"], ValueError, r"expected --spec MODULE NAME, got \['tiny_spec'\]"),
        (["no_such_plugin", "f"], ModuleNotFoundError, "the module 'no_such_plugin' does not exist"),
        (["tiny_spec.sub", "f"], ModuleNotFoundError, r"'tiny_spec\.sub' does not exist"),
        (["needs_something", "f"], ModuleNotFoundError, "it needs 'a_package_nobody_has', which is not"),
        (["tiny_spec", "get_spce"], AttributeError, r"has no 'get_spce'; it has .*get_spec, "),
    ],
    ids=["one-word", "no-module", "no-submodule", "missing-dependency", "no-attribute"],
)
def test_unusable_spec_says_why(spec: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        provider.resolve_spec(spec)


def test_no_spec_at_all() -> None:
    with pytest.raises(ValueError, match="no --spec given"):
        provider.make_provider(_args(spec=None))


def test_calling_conventions(make_config: Callable[..., Any]) -> None:
    import tiny_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    config, args = make_config(), _args()
    block = provider.call_spec(tiny_spec.get_spec, args, config, 1)
    assert len(block.layer_specs) == 2
    assert args.seen_by_spec == ("TransformerConfig", 1)
    assert provider.call_spec(block, args, config) is block
    spec = ModuleSpec(module=torch.nn.Identity)
    assert provider.call_spec(spec, args, config) is spec
    by_config = provider.call_spec(tiny_spec.get_spec_of_config, args, config, 2)
    assert by_config == ("config convention", config, 2)
    with pytest.raises(TypeError, match="returned None"):
        provider.call_spec(tiny_spec.get_nothing, args, config)
    with pytest.raises(TypeError, match="names a int"):
        provider.call_spec(tiny_spec.NOT_A_SPEC, args, config)


def test_a_provider_behind_the_spec_is_delegated_to(make_config: Callable[..., Any]) -> None:
    build = provider.make_provider(_args("get_provider"))
    assert build(post_process=False, config=make_config()) == ("provider", True, False, None)


def test_multi_token_prediction_is_refused(make_config: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="mtp_num_layers=0, got 1"):
        provider.make_provider(_args())(config=make_config(mtp_num_layers=1))


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_layers_see_the_ids_of_their_microbatch(make_config: Callable[..., Any], recompute: bool) -> None:
    options = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if recompute
        else {}
    )
    config = make_config(params_dtype=torch.float32, **options)
    config.vime_needs_token_ids = True
    # Megatron's rotary embedding would read a length from the packing object; models with ids rotate themselves.
    model = provider.make_provider(_args(position_embedding_type="none"))(config=config).train()
    seen: list[torch.Tensor] = []
    for layer in model.decoder.layers:
        original = layer.forward

        def forward(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            packed = kwargs.get("packed_seq_params") or next(a for a in args if hasattr(a, "token_ids"))
            seen.append(packed.token_ids)
            return original(*args, **kwargs)

        layer.forward = forward
    batches = [torch.randint(0, 32, (2, 8)) for _ in range(2)]
    positions = torch.arange(8).expand(2, 8)
    losses = [model(ids, positions, None, labels=ids).mean() for ids in batches]
    assert [s.tolist() for s in seen] == [ids.tolist() for ids in batches for _ in range(2)]
    seen.clear()
    for loss in losses:
        loss.backward()
    # A recomputed layer runs again, after the other microbatch's forward pass, with the ids of its own.
    expected = [ids.tolist() for ids in batches for _ in range(2)] if recompute else []
    assert [s.tolist() for s in seen] == expected


def test_without_the_flag_nothing_is_attached(make_config: Callable[..., Any]) -> None:
    model = provider.make_provider(_args())(config=make_config(params_dtype=torch.float32)).eval()
    ids = torch.randint(0, 32, (2, 8))
    logits = model(ids, torch.arange(8).expand(2, 8), None)
    assert logits.shape == (2, 8, 32)


def test_critic_returns_one_value_per_token(make_config: Callable[..., Any]) -> None:
    config = make_config(params_dtype=torch.bfloat16, bf16=True)
    model = provider.make_provider(_args(), role="critic")(config=config)
    assert model.output_layer.weight.shape == (1, 16)
    hidden = torch.randn(8, 2, 16, dtype=torch.bfloat16)
    values, _ = model.output_layer(hidden, weight=None, runtime_gather_output=None)
    assert values.dtype is torch.float32
    expected = hidden.double() @ model.output_layer.weight.double().T
    torch.testing.assert_close(values.double(), expected, rtol=2**-7, atol=1e-3)
    middle = provider.make_provider(_args(), role="critic")(config=config, post_process=False)
    assert not hasattr(middle, "output_layer")
