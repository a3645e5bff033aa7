# SPDX-License-Identifier: Apache-2.0
"""What is measured: the operations at the shapes of the models that use them.

A `Case` builds a `Problem` for any number of query rows, so that the same code gives the few rows that are compared
with float64 and the many that are timed. Picks look like a trained selection: causal, ascending, and alike for
neighbouring rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from vime_kernels import dsa, mhc

Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Model:
    """The dimensions of one model's attention."""

    name: str
    heads: int
    d_v: int
    tail: int
    topk: int
    ratio: int
    window: int
    index_heads: int
    hidden: int


MODELS = (
    Model("V4-Flash", 64, 512, 0, 512, 4, 128, 64, 4096),
    Model("V4-Pro", 128, 512, 0, 1024, 4, 128, 64, 7168),
    Model("V3.2", 128, 512, 64, 2048, 1, 0, 64, 7168),
    Model("GLM-5", 64, 512, 64, 2048, 1, 0, 32, 6144),
    Model("GLM-5.3", 64, 512, 0, 2112, 1, 0, 32, 4096),
)


@dataclass(frozen=True)
class Scale:
    """Where and how large: `tiny` shrinks every width, for the interpreter on a CPU."""

    device: str
    dtype: torch.dtype
    rows: int
    context: int
    tokens: int
    tiny: bool = False

    def model(self, model: Model) -> Model:
        """The model's dimensions at this scale."""
        if not self.tiny:
            return model
        tail = 16 if model.tail else 0
        return replace(
            model, heads=2, d_v=16, tail=tail, topk=4, window=min(model.window, 4), index_heads=2, hidden=32
        )

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal values."""
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)


@dataclass
class Problem:
    """One call: `call(backend, *leaves)` gives the outputs; leaves in float64 give the exact ones."""

    call: Callable[..., Outputs]
    leaves: list[torch.Tensor]
    differentiable: bool = True
    exact: bool = False  # the outputs are integers, and have to be equal
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One line of the benchmark."""

    op: str
    shape: str
    make: Callable[[Scale], Problem]
    directions: tuple[str, ...] = ("fwd", "bwd")


def cases() -> Iterator[Case]:
    """All cases, the costly operations first."""
    for model in MODELS:
        directions = ("fwd", "bwd", "bwd repeatable")
        name = "sparse_attention_v4" if model.window else "sparse_attention"
        yield Case(name, f"{model.name} picks", lambda s, m=model: attention(s, m, "picks"), directions)
    flash, pro, v32, glm5, glm53 = MODELS
    yield Case(
        "sparse_attention_v4", "V4-Flash ranges", lambda s: attention(s, replace(flash, ratio=128), "ranges")
    )
    yield Case("sparse_attention_v4", "V4-Flash window", lambda s: attention(s, flash, "window"))
    for model in (flash, v32, glm5):
        for precision in ("bf16", "fp8"):
            shape = f"{model.name} {precision}"
            yield Case("indexer_logits", shape, lambda s, m=model, p=precision: logits(s, m, p), ("fwd",))
        yield Case("indexer_scores", model.name, lambda s, m=model: scores(s, m))
        yield Case("topk", model.name, lambda s, m=model: selection(s, m), ("fwd",))
    yield Case("topk", "V3.2 128k", lambda s: selection(replace(s, context=8 * s.context), v32), ("fwd",))
    for model in (flash, replace(glm53, ratio=4)):
        yield Case("indexer_topk", f"{model.name} end to end", lambda s, m=model: pick(s, m), ("fwd",))
    yield Case("gated_pool", "V4 ratio 4", lambda s: pool(s, 512, 4, True))
    yield Case("gated_pool", "V4 ratio 128", lambda s: pool(s, 512, 128, False))
    yield Case("gated_pool", "GLM-5.3 keys", lambda s: pool(s, 128, 4, False))
    for model in (flash, pro):
        yield Case("mhc_mixes", model.name, lambda s, m=model: mixes(s, m))
        yield Case("mhc_pre", model.name, lambda s, m=model: pre(s, m))
        yield Case("mhc_post", model.name, lambda s, m=model: post(s, m))
        yield Case("mhc_head", model.name, lambda s, m=model: head(s, m))


def positions(scale: Scale) -> torch.Tensor:
    """The last rows of the context: int32 [S]."""
    first = scale.context - scale.rows
    return torch.arange(first, scale.context, device=scale.device, dtype=torch.int32)


def picks(scale: Scale, n: int, ratio: int, k: int) -> torch.Tensor:
    """int32 [S, k]: groups of 16 neighbouring rows share most of their k best of random scores."""
    rows = []
    for at in positions(scale).split(512):
        base = torch.rand(len(at) // 16 + 1, n, device=scale.device).repeat_interleave(16, 0)[: len(at)]
        score = base + 0.4 * torch.rand(len(at), n, device=scale.device)
        visible = torch.arange(n, device=scale.device) < ((at + 1) // ratio)[:, None]
        best = score.masked_fill(~visible, float("-inf")).topk(min(k, n), 1)
        chosen = best.indices.masked_fill(best.values.isneginf(), n).sort(1).values
        chosen = torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=n)
        rows.append(chosen.masked_fill(chosen == n, -1).to(torch.int32))
    return torch.cat(rows)


def attention(scale: Scale, model: Model, keys: str) -> Problem:
    """Sparse attention with its sink, if the model has one."""
    model = scale.model(model)
    D, n = model.d_v + model.tail, scale.context // model.ratio
    at = positions(scale)
    q = scale.randn(scale.rows, model.heads, D)
    indices = picks(scale, n, model.ratio, model.topk) if keys == "picks" else None
    if not model.window:
        assert indices is not None
        kv = scale.randn(n, D)

        def listed(backend: str, q: torch.Tensor, kv: torch.Tensor, *, repeatable: bool = False) -> Outputs:
            return _both(
                dsa.sparse_attention(
                    q,
                    kv,
                    indices,
                    D**-0.5,
                    d_v=model.d_v,
                    return_lse=True,
                    deterministic=repeatable,
                    backend=backend,
                )
            )

        return Problem(listed, [q, kv], peers=flash_mla(q, kv, indices, D**-0.5, None))
    kv, sink = scale.randn(scale.context, D), scale.randn(model.heads, dtype=torch.float32)
    leaves = [q, kv, sink] + ([scale.randn(n, D)] if keys != "window" else [])
    ranges = (torch.zeros_like(at), (at + 1) // model.ratio) if keys == "ranges" else None

    def windowed(backend: str, *leaves: torch.Tensor, repeatable: bool = False) -> Outputs:
        q, kv, sink, *compressed = leaves
        return _both(
            dsa.sparse_attention_v4(
                q, kv, compressed[0] if compressed else None, D**-0.5, sink, indices=indices, cmp_ranges=ranges,
                window=model.window, q_positions=at, return_lse=True, deterministic=repeatable, backend=backend,
            )
        )  # fmt: skip

    peers = {}
    if indices is not None:
        back = torch.arange(model.window - 1, -1, -1, device=scale.device, dtype=torch.int32)
        band = (at[:, None] - back).clamp(min=-1)
        joined = torch.cat([band, torch.where(indices < 0, -1, indices + scale.context)], 1)
        peers = flash_mla(q, torch.cat([kv, leaves[3]]), joined, D**-0.5, sink)
    return Problem(windowed, leaves, peers=peers)


def _both(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Outputs:
    assert isinstance(result, tuple)
    return result


def flash_mla(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, sink: torch.Tensor | None
) -> dict[str, Callable[[], object]]:
    """The sparse prefill of FlashMLA, where its operator library is loaded and takes this shape."""
    if q.device.type != "cuda" or not hasattr(torch.ops.sgl_kernel, "sparse_prefill_fwd"):
        return {}
    wide = torch.nn.functional.pad(indices, (0, -indices.shape[1] % 128), value=-1).contiguous()[:, None]
    run = torch.ops.sgl_kernel.sparse_prefill_fwd.default
    return {"FlashMLA": lambda: run(q, kv[:, None], wide, sm_scale, 512, sink, None)}


def index_inputs(scale: Scale, model: Model) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Queries, keys and head weights of the indexer, and the causal range of every row."""
    dim = 16 if scale.tiny else 128
    n = scale.context // model.ratio
    weights = scale.randn(scale.rows, model.index_heads, dtype=torch.float32)
    leaves = [scale.randn(scale.rows, model.index_heads, dim), scale.randn(n, dim), weights]
    at = positions(scale)
    return leaves, torch.zeros_like(at), (at + 1) // model.ratio


def logits(scale: Scale, model: Model, precision: str) -> Problem:
    """Scores of every visible key."""
    (q, k, weights), starts, ends = index_inputs(scale, scale.model(model))
    scales = {}
    if precision == "fp8" and not scale.tiny:  # the interpreter has no such products
        q, k = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
        scales = {
            "q_scale": torch.rand(q.shape[:2], device=scale.device) + 0.1,
            "k_scale": torch.rand(len(k), device=scale.device) + 0.1,
        }

    def call(backend: str, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> Outputs:
        cast = {key: value.to(weights.dtype) for key, value in scales.items()}
        return (dsa.indexer_logits(q, k, weights, starts, ends, backend=backend, **cast),)

    return Problem(call, [q, k, weights], differentiable=False)


def scores(scale: Scale, model: Model) -> Problem:
    """Scores at given picks, and their gradients."""
    model = scale.model(model)
    leaves, _, _ = index_inputs(scale, model)
    indices = picks(scale, len(leaves[1]), model.ratio, model.topk)

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (dsa.indexer_scores(*leaves, indices, backend=backend),)

    return Problem(call, leaves)


def selection(scale: Scale, model: Model) -> Problem:
    """Canonical top-k of given scores."""
    model = scale.model(model)
    at = positions(scale)
    values = scale.randn(scale.rows, scale.context // model.ratio, dtype=torch.float32)
    starts, ends = torch.zeros_like(at), (at + 1) // model.ratio

    def call(backend: str, values: torch.Tensor) -> Outputs:
        return (dsa.topk(values, model.topk, starts, ends, backend=backend),)

    peers = {"torch.topk": lambda: values.topk(min(model.topk, values.shape[1]), 1)}
    return Problem(call, [values], differentiable=False, exact=True, peers=peers)


def pick(scale: Scale, model: Model) -> Problem:
    """Scores and selection in one call, without the whole score matrix. Compared on integers: no rounding, no ties."""
    model = scale.model(model)
    leaves, starts, ends = index_inputs(scale, model)
    leaves = [leaf.float().mul(2).round().clamp(-4, 4).to(leaf.dtype) for leaf in leaves]

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (dsa.indexer_topk(*leaves, starts, ends, model.topk, backend=backend),)

    return Problem(call, leaves, differentiable=False, exact=True)


def pool(scale: Scale, dim: int, ratio: int, overlap: bool) -> Problem:
    """Gated pooling of one packed sequence."""
    tokens = scale.tokens
    width = (32 if scale.tiny else dim) * (2 if overlap else 1)
    leaves = [
        scale.randn(tokens, width),
        scale.randn(tokens, width),
        scale.randn(ratio, width, dtype=torch.float32),
    ]
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=scale.device)

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (dsa.gated_pool(*leaves, cu_seqlens, ratio, overlap=overlap, backend=backend)[0],)

    return Problem(call, leaves)


STREAMS = 4


def mixes(scale: Scale, model: Model) -> Problem:
    """Weightings of one sub-layer."""
    hidden, width = scale.model(model).hidden, (2 + STREAMS) * STREAMS
    fn = scale.randn(width, STREAMS * hidden, dtype=torch.float32) * (STREAMS * hidden) ** -0.5
    vectors = [scale.randn(size, dtype=torch.float32) for size in (3, width)]

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return mhc.mhc_mixes(*leaves, eps=1e-6, iters=20, norm_eps=1e-6, backend=backend)

    return Problem(call, [scale.randn(scale.tokens // 4, STREAMS, hidden), fn, *vectors])


def pre(scale: Scale, model: Model) -> Problem:
    """Input of a sub-layer."""
    T, hidden = scale.tokens // 4, scale.model(model).hidden

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (mhc.mhc_pre(*leaves, backend=backend),)

    return Problem(call, [scale.randn(T, STREAMS, hidden), scale.randn(T, STREAMS, dtype=torch.float32)])


def post(scale: Scale, model: Model) -> Problem:
    """Streams after a sub-layer."""
    T, hidden = scale.tokens // 4, scale.model(model).hidden
    mixing = [
        scale.randn(T, STREAMS, dtype=torch.float32),
        scale.randn(T, STREAMS, STREAMS, dtype=torch.float32),
    ]

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (mhc.mhc_post(*leaves, backend=backend),)

    return Problem(call, [scale.randn(T, hidden), scale.randn(T, STREAMS, hidden), *mixing])


def head(scale: Scale, model: Model) -> Problem:
    """Streams collapsed after the last layer."""
    T, hidden = scale.tokens // 4, scale.model(model).hidden
    fn = scale.randn(STREAMS, STREAMS * hidden, dtype=torch.float32) * (STREAMS * hidden) ** -0.5
    vectors = [scale.randn(size, dtype=torch.float32) for size in (1, STREAMS)]

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (mhc.mhc_head(*leaves, eps=1e-6, norm_eps=1e-6, backend=backend),)

    return Problem(call, [scale.randn(T, STREAMS, hidden), fn, *vectors])
