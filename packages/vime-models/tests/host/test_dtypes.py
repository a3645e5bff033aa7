# SPDX-License-Identifier: Apache-2.0
import torch

from vime_models.host.dtypes import enforce, mark_fp32


class _Layer(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scale = mark_fp32(torch.nn.Parameter(torch.ones(3, dtype=dtype)))
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        self.register_buffer("ids", torch.zeros(3, dtype=torch.int64))


def test_marked_tensors_survive_a_cast_in_place() -> None:
    model = torch.nn.Sequential(_Layer(), _Layer())
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.bfloat16()
    assert model[0].scale.dtype is torch.bfloat16, "the premise: a cast narrows marked tensors too"
    enforce([model])
    assert {name: p.dtype for name, p in model.named_parameters()} == {
        "0.scale": torch.float32,
        "0.weight": torch.bfloat16,
        "1.scale": torch.float32,
        "1.weight": torch.bfloat16,
    }
    assert all(before[name] is p for name, p in model.named_parameters())
    assert model[1].ids.dtype is torch.int64
    model[0].scale.grad = torch.full((3,), 2**-12)
    optimizer.step()
    assert model[0].scale[0] == 1 - 2**-13, "the optimizer updates the same, now wide, parameter"


def test_float64_models_keep_float64() -> None:
    layer = _Layer(torch.float64)
    enforce(layer)
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
