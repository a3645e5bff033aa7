# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections (mHC) in plain torch: the specification.

Takes and returns tensors in the dtype to compute in, except where a result is cast back once. Leaves out the
parameters' storage and the sub-layer between `pre` and `post`.

Source: mHC (Xie et al., 2026) and the DeepSeek-V4 release; the contract of shapes follows DeepSeek's TileKernels.
"""

import torch

from vime_kernels._backend import without_autocast


def mixes(
    X_TnC: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    eps: float,
    iters: int,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three weightings of one sub-layer, all from one projection of the normalised streams."""
    n = X_TnC.shape[1]
    m_pre, m_post, m_comb = _project(X_TnC, fn, norm_eps).split([n, n, n * n], dim=-1)
    b_pre, b_post, b_comb = base.split([n, n, n * n])
    pre_Tn = torch.sigmoid(m_pre * scale[0] + b_pre) + eps
    post_Tn = 2 * torch.sigmoid(m_post * scale[1] + b_post)
    comb_Tnn = sinkhorn((m_comb * scale[2] + b_comb).unflatten(-1, (n, n)), iters=iters, eps=eps)
    return pre_Tn, post_Tn, comb_Tnn


def sinkhorn(logits_Tnn: torch.Tensor, *, iters: int, eps: float) -> torch.Tensor:
    """Almost doubly stochastic matrices: a row softmax, then `iters` column passes with row passes between them."""
    M = logits_Tnn.softmax(-1) + eps
    M = M / (M.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        M = M / (M.sum(-1, keepdim=True) + eps)
        M = M / (M.sum(-2, keepdim=True) + eps)
    return M


def pre(X_TnC: torch.Tensor, pre_Tn: torch.Tensor) -> torch.Tensor:
    """Sum over streams i of pre[i] X[i]."""
    return (pre_Tn.unsqueeze(-1) * X_TnC).sum(1)


@without_autocast
def post(
    y_TC: torch.Tensor, X_TnC: torch.Tensor, post_Tn: torch.Tensor, comb_Tnn: torch.Tensor
) -> torch.Tensor:
    """New stream j: post[j] y + sum over source streams i of comb[i, j] X[i]."""
    return post_Tn.unsqueeze(-1) * y_TC.unsqueeze(1) + comb_Tnn.transpose(1, 2) @ X_TnC


def head(
    X_TnC: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    eps: float,
    norm_eps: float,
) -> torch.Tensor:
    """The streams collapsed for the final norm, with a `pre` weighting of its own."""
    return pre(X_TnC, torch.sigmoid(_project(X_TnC, fn, norm_eps) * scale + base) + eps)


@without_autocast
def _project(X_TnC: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """fn times rms-normalised streams, the norm applied after the product (it is one number per token)."""
    v = X_TnC.flatten(1)
    return (v @ fn.T) * torch.rsqrt(v.square().mean(-1, keepdim=True) + norm_eps)
