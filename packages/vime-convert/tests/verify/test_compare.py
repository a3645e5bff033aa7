# SPDX-License-Identifier: Apache-2.0
"""The verifier's own measuring instruments: each must notice what it is there to notice."""

import json

import pytest
import torch

from vime_convert.verify import report
from vime_convert.verify.case import CaseResult, layer_labels
from vime_convert.verify.compare import (
    Check,
    Trace,
    compare_forward,
    compare_gradients,
    first_bad_layer,
    layer_errors,
    relative,
)
from vime_convert.verify.margins import Margins
from vime_convert.verify.precision import PRECISIONS, running_in

STRICT = PRECISIONS["float64"]


def trace(seed: int = 0, layers: int = 3) -> Trace:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    grads = {"a": draw(4, 4), "b": draw(4)}
    return Trace(draw(1, 5, 7), [draw(1, 5, 2, 3) for _ in range(layers)], grads)


def test_equal_traces_pass() -> None:
    checks, errors = compare_forward(trace(), trace(), STRICT)
    assert all(
        check.ok and check.value == 0 for check in [*checks, *compare_gradients(trace(), trace(), STRICT)]
    )
    assert first_bad_layer(errors, STRICT) is None


def test_the_first_differing_layer_is_named() -> None:
    ours = trace()
    ours.states[1] = ours.states[1] + 1e-9
    ours.states[2] = ours.states[2] + 1e-3
    checks, errors = compare_forward(ours, trace(), STRICT)
    assert first_bad_layer(errors, STRICT) == 1
    assert not checks[0].ok
    assert checks[0].detail == "first layer that differs: 1"


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("layer, grad", [(0, "a"), (2, "b")], ids=["first", "last"])
def test_nan_and_inf_never_pass(value: float, layer: int, grad: str) -> None:
    ours = trace()
    ours.logits[0, 0, 0] = value
    ours.states[layer][0, 0, 0, 0] = value
    ours.grads[grad].view(-1)[0] = value
    checks, _ = compare_forward(ours, trace(), STRICT)
    assert [check.ok for check in checks] == [False, False]
    assert checks[0].detail == f"first layer that differs: {layer}"
    assert not compare_gradients(ours, trace(), STRICT)[0].ok


def test_missing_and_extra_gradients_fail() -> None:
    ours = trace()
    ours.grads["c"] = ours.grads.pop("b")
    checks = compare_gradients(ours, trace(), STRICT)
    assert checks[-1].name == "gradient-names[float64]"
    assert checks[-1].value == 2
    assert not checks[-1].ok


def test_a_frozen_tensor_may_have_a_zero_reference_gradient() -> None:
    ours, reference = trace(), trace()
    del ours.grads["b"]
    reference.grads["b"].zero_()
    assert all(check.ok for check in compare_gradients(ours, reference, STRICT))


def test_vanishing_gradient_is_measured_against_the_whole() -> None:
    reference = {"big": torch.ones(100), "zero": torch.full((2,), 1e-20)}
    assert relative(torch.zeros(2), reference["zero"]) == 1
    ours = Trace(trace().logits, [], {"big": torch.ones(100), "zero": torch.zeros(2)})
    other = Trace(trace().logits, [], reference)
    assert compare_gradients(ours, other, STRICT)[0].ok


def test_shape_mismatch_is_infinite() -> None:
    assert relative(torch.zeros(2), torch.zeros(3)) == float("inf")
    with pytest.raises(ValueError, match=r"shorter|longer"):
        layer_errors(trace(layers=2), trace(layers=3))


def test_margins_see_ties_and_clamp_bounds() -> None:
    with Margins() as margins:
        torch.tensor([3.0, 2.5, 2.5, 1.0]).topk(2)
        torch.tensor([0.2, 0.9]).clamp(min=-1.0, max=1.0)
        torch.tensor([1, 5]).clamp(max=5)
    assert margins.topk == 0
    assert margins.clamp == pytest.approx(0.1, abs=1e-6)


def test_margins_ignore_rows_without_a_choice() -> None:
    with Margins() as margins:
        torch.tensor([[1.0, -float("inf"), -float("inf")]]).topk(1)
        torch.tensor([1.0, 2.0]).topk(2)
    assert margins.topk == float("inf")


def test_float64_mode_covers_every_way_to_ask_for_float32() -> None:
    with running_in(STRICT):
        x = torch.ones(3, dtype=torch.bfloat16)
        assert x.float().dtype is torch.float64
        assert x.to(torch.float32).dtype is torch.float64
        assert x.to(dtype=torch.float).dtype is torch.float64
        assert torch.softmax(x, 0, dtype=torch.float32).dtype is torch.float64
        assert torch.zeros(1, dtype=torch.float32).dtype is torch.float64
        assert torch.ones(1).dtype is torch.float64
    assert torch.ones(1).dtype is torch.float32


def result(ok: bool = True) -> CaseResult:
    checks, errors = compare_forward(trace(), trace(0 if ok else 1), STRICT)
    checks.append(Check("round-trip[release]", 0, 0))
    return CaseResult("tiny", "all kinds", 5, ["0", "4", "128"], checks, {"float64": errors})


def test_table_and_verdict() -> None:
    assert report.table([result()]).splitlines()[-1].startswith("PASS: 1 case(s), 3 checks")
    text = report.table([result(ok=False)])
    assert "FAIL: 1 case(s)" in text
    assert "first layer that differs: 0" in text
    assert report.verdict([]) == "FAIL"


def test_json_is_valid_and_says_what_failed() -> None:
    bad = result(ok=False)
    bad.checks[0] = Check("streams[float64]", float("inf"), 1e-11)
    data = json.loads(report.as_json([bad], {"model_type": "m"}))
    assert data["verdict"] == "FAIL"
    assert data["cases"][0]["checks"][0] == {
        "name": "streams[float64]",
        "value": "inf",
        "limit": 1e-11,
        "detail": "",
        "ok": False,
    }


def test_html_is_self_contained_and_plots_every_layer() -> None:
    page = report.as_html([result()], {"model_type": "m"})
    assert page.count("<circle") == 3
    assert "PASS" in page
    assert "src=" not in page
    assert "<link" not in page


@pytest.mark.parametrize(
    "config, labels",
    [
        ({"num_hidden_layers": 2, "compress_ratios": [0, 4, 0]}, ["0", "4"]),
        ({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, ["sliding"]),
        ({"num_hidden_layers": 1}, ["layer"]),
    ],
    ids=["ratios", "types", "plain"],
)
def test_layer_labels(config: dict, labels: list[str]) -> None:
    assert layer_labels(config) == labels
