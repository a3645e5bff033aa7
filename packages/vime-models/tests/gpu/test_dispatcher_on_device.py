# SPDX-License-Identifier: Apache-2.0
"""On a GPU the results of a token's experts are added in float32, and the same bits come out again."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from vime_models.dsv4.dispatcher import _Sum, by_expert

T, E, K, C = 512, 16, 6, 256


@pytest.mark.gpu
def test_bfloat16_is_rounded_once() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    picks = torch.rand(T, E, device="cuda", generator=generator).topk(K).indices
    routing_map = torch.zeros(T, E, dtype=torch.bool, device="cuda").scatter(1, picks, True)
    _, order, places = by_expert(routing_map, K)
    assert order.equal(permute(torch.zeros(T, 1, device="cuda"), routing_map, num_out_tokens=T * K)[2])
    rows = torch.randn(T * K, C, device="cuda", generator=generator).bfloat16()

    exact = rows.double()[places].sum(1)
    summed = _Sum.apply(rows, order, places, None)
    # Half a unit in the last of bfloat16's 8 places, and what float32 adds to it.
    half_unit = torch.ldexp(torch.ones_like(exact), exact.frexp().exponent - 9)
    bound = half_unit * (1 + 2**-6) + 1e-5
    assert ((summed.double() - exact).abs() <= bound).all()
    assert all(_Sum.apply(rows, order, places, None).equal(summed) for _ in range(20))
    rounded_often = unpermute(rows, order, torch.Size((T, C)))
    assert not ((rounded_often.double() - exact).abs() <= bound).all(), "the premise: each addition rounds"
