# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vime_models.host.linear import ReplicatedLinear


def _build(config: Any, **options: Any) -> ReplicatedLinear:
    return ReplicatedLinear(
        6, 3, config=config, init_method=torch.nn.init.ones_, tp_group=None, name="x", **options
    )


def test_returns_the_pair_of_megatrons_linears(make_config: Callable[..., Any]) -> None:
    x = torch.randn(4, 2, 6, dtype=torch.float64)
    plain = _build(make_config())
    out, bias = plain(x)
    assert bias is None
    torch.testing.assert_close(out, x.sum(-1, keepdim=True).expand(4, 2, 3))
    with_bias = _build(make_config(), bias=True)
    torch.nn.init.constant_(with_bias.bias, 2.0)
    torch.testing.assert_close(with_bias(x)[0], out + 2)
    skipped = _build(make_config(), bias=True, skip_bias_add=True)
    out_skipped, returned = skipped(x)
    assert returned is skipped.bias
    torch.testing.assert_close(out_skipped, out)


@pytest.mark.parametrize(
    "in_config, given, expected",
    [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
    ids=["config-off", "config-on", "overridden-off", "overridden-on"],
)
def test_sequence_parallel_flag(
    make_config: Callable[..., Any], in_config: bool, given: bool | None, expected: bool
) -> None:
    config = make_config()
    config.sequence_parallel = in_config
    linear = _build(config, bias=True, sequence_parallel=given)
    assert [parameter.sequence_parallel for parameter in linear.parameters()] == [expected, expected]
