# SPDX-License-Identifier: Apache-2.0
"""The ranks of test_indexer_loss.py: gradients of the indexer's loss on several ranks against one of them alone."""

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import DEVICE, serve
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from step import shared_checkpoint

from vime_convert.megatron.exporter import export_tensors
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.verify.compare import relative
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_models.dsv4.plugin import PLUGIN

HERE = Path(sys.argv[1])
CONFIG = next(case.config for case in PLUGIN.tiny_cases if case.name == "flash")
TABLE = PLUGIN.rules(CONFIG)
# The cut of two ranks is inside the second sequence and inside one of its groups; the third ends in padding.
REAL, PADDED = (37, 291, 170), (37, 293, 182)
FLOAT64 = PRECISIONS["float64"]


def gradients(mode: str, **options: Any) -> dict[str, torch.Tensor]:
    """Of the indexers' parameters, by release name, summed over context-parallel ranks."""
    with running_in(FLOAT64):
        (model,) = PLUGIN.build(CONFIG, dtype=torch.float64, device=DEVICE, train_indexer=mode, **options)
    load_checkpoint([model], shared_checkpoint(CONFIG, HERE / "checkpoint"), TABLE)
    ids = torch.randint(
        CONFIG["vocab_size"], (1, sum(PADDED)), generator=torch.Generator().manual_seed(0)
    ).to(DEVICE)
    cp = parallel_state.get_context_parallel_group()
    real, padded = (
        torch.tensor([0, *lengths]).cumsum(0).to(device=DEVICE, dtype=torch.int32)
        for lengths in (REAL, PADDED)
    )
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded
    )
    with running_in(FLOAT64):
        logits = model.train()(ids.chunk(cp.size(), 1)[cp.rank()], None, None, packed_seq_params=packed)
        # Only the attached loss is looked at; this one starts the backward pass.
        logits.mean().backward()
        grads = dict(export_tensors([model], TABLE, value=lambda p: p.grad if p.requires_grad else None))
    indexers = {name: grad.contiguous() for name, grad in grads.items() if ".indexer." in name}
    for grad in indexers.values():
        dist.all_reduce(grad, group=cp)
    return indexers


@cache
def alone(mode: str) -> dict[str, torch.Tensor]:
    return gradients(mode)


def difference(mode: str, **options: Any) -> dict[str, float]:
    expected, found = alone(mode), gradients(mode, **options)
    assert found.keys() == expected.keys()
    return {name: relative(found[name], grad) for name, grad in expected.items()}


def planted() -> dict[str, float]:
    """Without the sum over heads the comparison must fail."""
    expected = alone("joint")
    original = dist.all_reduce

    def only_gradients(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (
            None
            if tensor.ndim == 2 and tensor.shape[1] == CONFIG["index_topk"]
            else original(tensor, *args, **kwargs)
        )

    with mock.patch.object(dist, "all_reduce", only_gradients):
        found = gradients("joint", tp=2)
    return {name: relative(found[name], grad) for name, grad in expected.items()}


CASES = {
    f"{mode}-{name}": partial(difference, mode, **options)
    for mode in ("joint", "warmup")
    for name, options in {
        "tp2": {"tp": 2},
        "cp2": {"cp": 2, "cp_layout": "contiguous"},
        "cp2-balanced": {"cp": 2, "cp_layout": "contiguous", "cp_balance": True},
    }.items()
}

if __name__ == "__main__":
    serve(CASES | {"planted": planted})
