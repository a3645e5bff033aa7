# SPDX-License-Identifier: Apache-2.0
"""The TileLang kernels of Miles (radixark/miles at 31f1ca96, TileLang 0.1.9), tuned: 256 threads in the backward pass,
and rows indexed directly. Megatron's for the indexer's loss.

As published, the backward pass takes 128 threads and the 576-wide kernels copy the row indices into a fragment, which
costs 3.4 and up to 4.6 times. The direct kernels are expected beside the published ones, as `…_direct.py`.
"""

import importlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from problem import Case, Problem

from peers import Rival, compare, padded
from peers.deepgemm import visible_only

OPS = (
    "sparse_attention",
    "sparse_attention_v4",
    "indexer_logits",
    "indexer_scores",
    "act_quant",
    "fake_quant_fp8",
    "indexer_kl_target",
    "indexer_kl_loss",
)
STATIC = True

V4 = "miles_plugins.models.deepseek_v4.ops.kernel"
GLM = "miles_plugins.models.glm5.ops"
MEGATRON = "megatron.core.transformer.experimental_attention_variant.ops"
GUARD = 64  # rows in front of a buffer: the kernels touch row -1


def load(paths: list[str]) -> None:
    """Imports TileLang for sm_90a, and finds the kernels."""
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    os.environ.setdefault("TILELANG_TARGET", "cuda -arch=sm_90a")
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    importlib.import_module(f"{V4}.tilelang_sparse_mla_fwd")


def rivals(case: Case, problem: Problem, direction: str) -> Iterator[Rival]:
    """Attention from 16 heads on, bf16 logits, the backward pass of the scores, and DeepSeek's quantisation."""
    facts = problem.facts
    if case.op.startswith("sparse_attention") and not direction.endswith("repeatable"):
        joined = case.shape.endswith(
            ("picks", "heads")
        )  # each shape compiles anew: the lists of the models only
        if facts["q"].shape[1] >= 16 and joined:
            yield Attention(problem).rival(direction)
    elif case.op == "indexer_logits" and "q_scale" not in facts:
        fwd = importlib.import_module(f"{V4}.tilelang_indexer_fwd").indexer_fwd_interface
        q, k, weights = problem.leaves

        def scored() -> torch.Tensor:
            return fwd(q, k, weights, facts["starts"], facts["ends"], clean_logits=True)

        yield Rival("TileLang", {"": scored}, compare(lambda r: [visible_only(r, problem)]))
    elif case.op == "indexer_scores" and direction == "bwd":
        bwd = importlib.import_module(f"{V4}.tilelang_indexer_bwd").indexer_bwd_interface
        q, k, weights = problem.leaves
        grad = problem.grads[0] if problem.grads else None
        launch = lambda: bwd(q, weights, k, facts["indices"], grad)  # noqa: E731
        yield Rival("TileLang", {"": launch}, compare(lambda r: [r[0], r[2], r[1]]))
    elif case.op in ("act_quant", "fake_quant_fp8"):
        yield quantisation(case, problem)
    elif case.op in ("indexer_kl_target", "indexer_kl_loss") and direction == "fwd":
        yield megatron(case, problem)


class Attention:
    """The kernels of one shape. A missing sink is one of minus infinity."""

    def __init__(self, problem: Problem) -> None:
        self.problem, facts = problem, problem.facts
        self.q, self.N = facts["q"][None], len(facts["kv"])
        _, self.S, self.H, width = self.q.shape
        self.tail = width - 512
        self.indices = padded(facts["indices"], 64)[None]
        self.K = self.indices.shape[-1]
        self.kv = guarded(facts["kv"])[None]
        sink = facts["sink"]
        self.sink = torch.full((self.H,), float("-inf"), device=self.q.device) if sink is None else sink
        if self.tail:
            self.kv, self.indices = self.kv[:, :, None], self.indices[:, :, None]

    def rival(self, direction: str) -> Rival:
        """The forward kernel, or the three of the backward pass."""
        forward = self.forward()
        if direction == "fwd":
            return Rival("TileLang", {"": forward}, compare(self.outputs))
        return Rival("TileLang", self.backward(*forward()), compare(lambda r: r))

    def forward(self) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Output and base-2 lse with the sink."""
        if self.tail:
            kernel = glm("fwd").sparse_mla_fwd(self.H, 512, self.tail, self.K, 1, None, True)
            return lambda: kernel(self.q, self.kv, self.indices)
        module = importlib.import_module(f"{V4}.tilelang_sparse_mla_fwd")
        kernel = module.sparse_mqa_fwd(self.H, 512, self.K, None)
        return lambda: kernel(self.q, self.kv, self.sink, self.indices)

    def outputs(self, returned: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """Output, and the lse in natural units without the sink."""
        total = returned[1][0].double() * math.log(2.0)
        return [returned[0][0], total + torch.log(-torch.expm1(self.sink - total))]

    def backward(self, out: torch.Tensor, lse: torch.Tensor) -> dict[str, Callable[[], object]]:
        """Delta, zeroed accumulators, the main kernel and the cast, in one launch each."""
        S, N, H, K = self.S, self.N, self.H, self.K
        do = self.problem.output_grads((out[0],))[0][None]
        buffer = torch.zeros(N + GUARD, 512 + self.tail, device=do.device)
        sums = buffer[GUARD:][None]
        split = self.problem.facts["split"]
        if self.tail:
            module, sums = glm("bwd"), sums[:, :, None]
            pre, post = module.preprocess(1, S, H, 512), module.postprocess(1, N, 512, self.tail, 1)
            main = module.bwd(1, S, N, H, 512, self.tail, K, 1, None, True, threads=256)

            def launch() -> list[torch.Tensor]:
                buffer.zero_()
                dq = main(self.q, self.kv, do, self.indices, lse, pre(out, do), sums)
                return split(dq[0], post(sums)[0, :, 0], self.sink)

            return {"": launch}
        module = importlib.import_module(f"{V4}.tilelang_sparse_mla_bwd")
        pre, post = module.preprocess(1, S, H, 512), module.postprocess(1, N, 512)
        tuned = {"threads": 256, "num_stages": 1} if H >= 64 else {}  # fewer heads do not compile with it
        main = module.bwd(1, S, N, H, 512, K, None, **tuned)

        def launch_v4() -> list[torch.Tensor]:
            buffer.zero_()
            dsink = torch.zeros_like(self.sink)
            dq = main(self.q, self.kv, do, self.sink, self.indices, lse, pre(out, do), sums, dsink)
            return split(dq[0], post(sums)[0], dsink)

        return {"": launch_v4}


def glm(direction: str) -> Any:
    """The 576-wide kernels, with direct indices where they are there."""
    try:
        return importlib.import_module(f"{GLM}.tilelang_sparse_mla_{direction}_direct")
    except ModuleNotFoundError:
        return importlib.import_module(f"{GLM}.tilelang_sparse_mla_{direction}")


def guarded(rows: torch.Tensor) -> torch.Tensor:
    """The same rows behind others that are zero."""
    return torch.nn.functional.pad(rows, (0, 0, GUARD, 0))[GUARD:]


def quantisation(case: Case, problem: Problem) -> Rival:
    """DeepSeek's kernel: codes and scales, or there and back."""
    module = importlib.import_module(f"{V4}.act_quant")
    (x,), block = problem.leaves, problem.facts["block"]
    rows, back = x.shape[-1], case.op == "fake_quant_fp8"
    kernel = module.act_quant_kernel(rows, block, round_scale=True, inplace=back)

    def launch() -> list[torch.Tensor]:
        y = torch.empty_like(x) if back else torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = x.new_empty(len(x), rows // block, dtype=torch.float32)
        kernel(x, y, scales)
        return [y] if back else [y, scales]

    return Rival("DeepSeek act_quant", {"": launch}, compare(lambda r: r))


def megatron(case: Case, problem: Problem) -> Rival:
    """megatron-core 0.19.2: the teacher with denominators of its own, and the loss with the gradient on the way."""
    loss = importlib.import_module(f"{MEGATRON}.tilelang_indexer_loss")
    facts = problem.facts
    if case.op == "indexer_kl_target":
        q, kv = problem.leaves

        def target() -> torch.Tensor:
            return loss.sparse_indexer_target_interface(q, kv, facts["indices"], facts["sm_scale"])

        return Rival("Megatron", {"": target}, compare(lambda r: [r]))
    (scores,), valid = problem.leaves, facts["indices"] >= 0

    def divergence() -> tuple[torch.Tensor, torch.Tensor]:
        return loss.sparse_indexer_kl_interface(facts["target"], scores, valid)

    return Rival("Megatron", {"": divergence}, compare(lambda r: [r[0] / valid.any(1).sum()]))
