# SPDX-License-Identifier: Apache-2.0
"""cuDNN frontend 1.32.0, sparse attention for SM90: attention backward, indexer, its backward, teacher, top-k."""

from collections.abc import Iterator
from typing import Any

import torch
from problem import Case, Problem, difference

from peers import Rival, compare, equal, same_values
from peers.deepgemm import visible_only

OPS = (
    "sparse_attention", "sparse_attention_v4", "indexer_logits", "indexer_scores", "indexer_kl_target", "topk",
    "indexer_topk",
)  # fmt: skip
STATIC = True

_dsa: Any = None


def load(paths: list[str]) -> None:
    """Imports the frontend and its compiler."""
    global _dsa
    from cudnn.deepseek_sparse_attention import DSA

    _dsa = DSA


def rivals(case: Case, problem: Problem, direction: str) -> Iterator[Rival]:
    """Whatever it has for Hopper."""
    if case.op.startswith("sparse_attention") and direction == "bwd":
        yield attention(problem)
    elif case.op == "indexer_logits":
        yield logits(problem)
    elif case.op == "indexer_scores" and direction == "bwd":
        yield scores(problem)
    elif case.op == "indexer_kl_target":
        yield teacher(problem)
    elif case.op == "topk":
        yield from selection(problem)
    elif case.op == "indexer_topk":
        yield end_to_end(problem)


def attention(problem: Problem) -> Rival:
    """Backward pass over the joined buffer, from our output and lse."""
    facts = problem.facts
    q, kv, indices = facts["q"], facts["kv"], facts["indices"]
    out, lse = (t.detach() for t in problem.call("triton", *problem.leaves))
    (dout,) = problem.output_grads((out,))
    sink = facts["sink"]
    if sink is None:
        sink = torch.full((q.shape[1],), float("-inf"), device=q.device)

    def launch() -> Any:
        return _dsa.sparse_attention_backward_wrapper(
            q, kv, out, dout, lse, sink, indices, softmax_scale=facts["sm_scale"]
        )

    def results(r: Any) -> list[torch.Tensor]:
        return facts["split"](r["dq"], r["dkv"], r["d_sink"])

    return Rival("cuDNN", {"": launch}, compare(results))


def logits(problem: Problem) -> Rival:
    """Logits, always cleaned. The product of weights and query scales is not charged."""
    q, k, weights = problem.leaves
    facts = problem.facts
    shared = indexer_arguments(problem, facts["ratio"])
    extra: dict[str, Any] = {}
    if "q_scale" in facts:
        weights = weights * facts["q_scale"]
        extra = {
            "precision": "fp8",
            "q_scale": facts["q_scale"][None],
            "k_scale": facts["k_scale"][None, :, None],
        }

    def launch() -> Any:
        return _dsa.indexer_forward_wrapper(
            q[None], k[None, :, None], weights[None], sm_scale=1.0, **shared, **extra
        )

    return Rival("cuDNN", {"": launch}, compare(lambda r: [visible_only(r["scores"], problem)]))


def scores(problem: Problem) -> Rival:
    """Gradients of the indexer under the Kullback-Leibler loss: makes the score gradient itself, in 4 S K bytes."""
    q, k, weights = problem.leaves
    facts = problem.facts
    weights = weights.to(q.dtype)[None]
    target = facts["target"][None].clone()  # overwritten by every launch; its values do not change the time
    grad_loss = torch.ones(1, device=q.device)

    def launch() -> Any:
        return _dsa.indexer_backward_wrapper(
            q[None], weights, k[None], target, facts["student"][None], facts["indices"][None], grad_loss,
            loss_coeff=float(len(q)), topk_indices_global=True,
        )  # fmt: skip

    def results(_: Any) -> list[torch.Tensor]:
        target.copy_(facts["target"][None])
        r = launch()
        return [r["d_index_q"][0], r["d_index_k"][0], r["d_weights"][0]]

    return Rival("cuDNN", {"": launch}, compare(results))


def teacher(problem: Problem) -> Rival:
    """Attention mass at the picks, normalised in the same launch."""
    facts = problem.facts

    def launch() -> Any:
        return _dsa.sparse_attn_score_recompute_wrapper(
            facts["q"][None], facts["kv"][None], facts["lse"][None], facts["indices"][None], facts["sm_scale"],
            qhead_per_kv_head=facts["q"].shape[1], topk_indices_global=True,
        )  # fmt: skip

    def error(r: Any, exact: list[torch.Tensor]) -> float:
        return difference([r["target"][0]], [exact[0] / exact[0].sum(-1, keepdim=True)], whole=False)

    return Rival("cuDNN", {"": launch}, error)


def selection(problem: Problem) -> Iterator[Rival]:
    """The deterministic selection, which states our rule, and the fast one. Ranges start at column 0."""
    values, facts = problem.leaves[0], problem.facts

    def launch(deterministic: bool) -> Any:
        return _dsa.indexer_top_k_wrapper(
            values, facts["ends"], facts["k"], return_val=False,
            tie_break=int(deterministic), deterministic=deterministic,
        )["indices"]  # fmt: skip

    yield Rival("cuDNN deterministic", {"": lambda: launch(True)}, equal(lambda r: r))
    yield Rival("cuDNN fast", {"": lambda: launch(False)}, same_values(values, lambda r: r))


def end_to_end(problem: Problem) -> Rival:
    """All logits, then the deterministic selection."""
    q, k, weights = problem.leaves
    facts = problem.facts
    shared = indexer_arguments(problem, facts["ratio"])

    def launch() -> Any:
        made = _dsa.indexer_forward_wrapper(q[None], k[None, :, None], weights[None], sm_scale=1.0, **shared)
        return _dsa.indexer_top_k_wrapper(
            made["scores"][0], facts["ends"], facts["k"], return_val=False, tie_break=1, deterministic=True
        )["indices"]

    return Rival("cuDNN", {"": launch}, equal(lambda r: r))


def indexer_arguments(problem: Problem, ratio: int) -> dict[str, Any]:
    """The causal mask in its terms: ratio, heads, and the position of the first row."""
    q, k = problem.leaves[:2]
    first = len(k) * ratio - len(q)
    offset = torch.tensor([first], dtype=torch.int32, device=q.device)
    return {"ratio": ratio, "qhead_per_kv_head": q.shape[1], "q_causal_offsets": offset}
