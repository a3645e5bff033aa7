# SPDX-License-Identifier: Apache-2.0
"""Memory and traffic of a parallel layout, before anything is launched.

The formulas are in docs/scaling.md; what a model is made of comes from its plugin's `sizes`. Parameters, gradients and
optimizer state are exact, activations are an estimate, and what the framework itself takes (CUDA context, NCCL
buffers, fragmentation) is not counted: `DEVICE_GB` leaves room for it. `suggest` ranks layouts by a rough time of
compute, pipeline bubble and wires; it decides what to try first, not what is fastest.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

GB = 1e9
# Of the 141 GB of an H200.
DEVICE_GB = 125.0
GPUS_PER_NODE = 8
# Rough rates per GPU: bytes per second inside and between nodes, and sustained operations per second.
NODE_RATE, NETWORK_RATE, COMPUTE_RATE = 300e9, 40e9, 300e12
RECOMPUTE = ("none", "moe", "full")


class PlanError(ValueError):
    """A layout that cannot work; the message names the flag, the rule and the nearest valid value."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the process groups and how a step is cut.

    Attributes:
        gpus: all ranks.
        tp, pp, ep, etp, cp: tensor, pipeline, expert, expert-tensor and context parallelism.
        seq_len: tokens of a microbatch, all context-parallel ranks together.
        batch: microbatches of a step, all data-parallel ranks together.
        recompute: "none", "moe" (each MoE sub-block) or "full" (each layer).
        bytes_per_value: of parameters and activations; 2 (with float32 gradients and master weights) or 4.
    """

    gpus: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    seq_len: int = 16384
    batch: int = 256
    recompute: str = "full"
    bytes_per_value: int = 2

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.gpus // (self.etp * self.ep * self.pp)

    @property
    def microbatches(self) -> int:
        """Per rank and step."""
        return -(-self.batch // self.dp)


@dataclass(frozen=True)
class Stage:
    """Bytes on each rank of a pipeline stage, and what it sends in a step, by group.

    Attributes:
        layers: global indices of its layers.
        parameters, gradients, optimizer, activations: bytes.
        sent: group to bytes per step.
    """

    layers: range
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    sent: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def stage_layers(layers: int, pp: int) -> list[range]:
    """Layers of each stage: equal stages, or equal inner ones with a shorter first and last one.

    Megatron's `--decoder-first-pipeline-num-layers` and `--decoder-last-...` express exactly these.
    """
    inner = -(-layers // pp)
    rest = layers - inner * (pp - 2)
    while pp > 2 and rest < 2:
        inner -= 1
        rest = layers - inner * (pp - 2)
    counts = [layers] if pp == 1 else [-(-rest // 2), *[inner] * (pp - 2), rest // 2]
    starts = [sum(counts[:i]) for i in range(pp)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


Rule = tuple[str, int, Callable[[int], bool], str]


def _rules(hf: Any, layout: Layout) -> Iterator[Rule]:
    """Flag, value, whether a value is valid, and the rule in words."""
    heads, groups, gpus = hf.num_heads, hf.o_groups, layout.gpus
    yield (
        "--tp",
        layout.tp,
        lambda v: heads % v == 0 and groups % v == 0,
        f"must divide num_attention_heads ({heads}) and o_groups ({groups})",
    )
    layers, experts, width = hf.num_layers, hf.num_experts, hf.moe_intermediate_size
    yield "--pp", layout.pp, lambda v: v <= layers, f"must be at most the number of layers ({layers})"
    yield "--ep", layout.ep, lambda v: experts % v == 0, f"must divide the number of experts ({experts})"
    yield "--etp", layout.etp, lambda v: width % v == 0, f"must divide moe_intermediate_size ({width})"
    length = layout.seq_len
    yield (
        "--cp",
        layout.cp,
        lambda v: length % v == 0 and (v == 1 or length // v >= 128),
        f"must divide --seq-len ({length}) into at least 128 tokens",
    )
    dense, expert = layout.tp * layout.pp * layout.cp, layout.etp * layout.ep * layout.pp
    yield "--gpus", gpus, lambda v: v % dense == 0, f"must be a multiple of tp · pp · cp ({dense})"
    yield "--gpus", gpus, lambda v: v % expert == 0, f"must be a multiple of etp · ep · pp ({expert})"
    dp = max(1, gpus // dense)
    yield (
        "--batch",
        layout.batch,
        lambda v: v % dp == 0,
        f"must be a multiple of the data-parallel size ({dp})",
    )


def check(hf: Any, layout: Layout, only: Collection[str] | None = None) -> None:
    """Refuses a layout that cannot work.

    Args:
        hf: config of the checkpoint.
        layout: to check.
        only: flags whose rules count; None for all.

    Raises:
        PlanError: names the flag, its value, the rule and the nearest valid value.
    """
    for flag, value, holds, rule in _rules(hf, layout):
        if (only is None or flag in only) and (value < 1 or not holds(value)):
            valid = [v for v in range(1, 2 * max(value, layout.gpus) + 1) if holds(v)]
            nearest = min(valid, key=lambda v: abs(v - value))
            raise PlanError(f"vime_models.plan: {flag} is {value}: {rule}; nearest valid value: {nearest}")


def stages(hf: Any, sizes: Any, layout: Layout) -> list[Stage]:
    """Memory and traffic of every pipeline stage.

    Args:
        hf: config of the checkpoint.
        sizes: its plugin's module of counts, e.g. `vime_models.dsv4.sizes`.
        layout: how it is distributed.

    Raises:
        PlanError: a layout that cannot work.
    """
    check(hf, layout)
    parts = stage_layers(hf.num_layers, layout.pp)
    return [_stage(hf, sizes, layout, index, layers) for index, layers in enumerate(parts)]


def _stage(hf: Any, sizes: Any, layout: Layout, index: int, layers: range) -> Stage:
    first, last = index == 0, index == layout.pp - 1
    weights = [
        (count, w) for layer, count in _kinds(hf, sizes, layers) for w in sizes.layer_weights(hf, layer)
    ]
    ends = [*(sizes.embedding_weights(hf) if first else ()), *(sizes.head_weights(hf) if last else ())]
    weights += [(1, w) for w in ends]
    width = layout.bytes_per_value
    divide = {"": 1, "tp": layout.tp, "sp": layout.tp, "ep": layout.ep * layout.etp}
    parameters = gradients = optimizer = sent = 0.0
    for count, w in weights:
        local = count * w.elements / divide[w.split]
        replicas = layout.expert_dp if w.split == "ep" else layout.dp * layout.cp
        value = 4 if w.fp32 else width
        parameters += local * value
        if w.trained:
            gradients += local * 4
            # Two moments, and a float32 copy of what is not float32.
            optimizer += local * (8 if value == 4 else 12) / replicas
            sent += local * (4 + value) * (replicas - 1) / replicas
    traffic = {"dp": sent} | _traffic(hf, sizes, layout, layers, first=first, last=last)
    return Stage(
        layers, parameters, gradients, optimizer, _activations(hf, sizes, layout, index, layers), traffic
    )


def _kinds(hf: Any, sizes: Any, layers: range) -> list[tuple[int, int]]:
    """A layer of every size, and how many of the layers have it."""
    return list(Counter(sizes.same_layer(hf, layer) for layer in layers).items())


def _activations(hf: Any, sizes: Any, layout: Layout, index: int, layers: range) -> float:
    """Bytes that the microbatches in flight keep, and the working set of one layer that is recomputed."""
    tokens, width = layout.seq_len / layout.cp, layout.bytes_per_value
    # A token is sent to K experts on as many ranks; with balanced experts every rank gets its share.
    divide = {"": 1, "tp": layout.tp, "sp": layout.tp, "ep": layout.tp}
    in_flight = min(layout.pp - index, layout.microbatches)
    streams = hf.hc_mult * hf.hidden_size * width / layout.tp
    kept = working = 0.0
    for layer, count in _kinds(hf, sizes, layers):
        rows = list(sizes.layer_kept(hf, layer, width))
        everything = sum(row.bytes / divide[row.split] for row in rows)
        moe = sum(row.bytes / divide[row.split] for row in rows if row.moe)
        kept += count * {"none": everything, "moe": everything - moe, "full": streams}[layout.recompute]
        working = max(working, {"none": 0.0, "moe": moe, "full": everything}[layout.recompute])
    if index == layout.pp - 1:
        # Logits and their float32 softmax, of one microbatch.
        working += hf.vocab_size / layout.tp * (width + 8)
    return tokens * (kept * in_flight + working)


def _traffic(
    hf: Any, sizes: Any, layout: Layout, layers: range, *, first: bool, last: bool
) -> dict[str, float]:
    """Bytes that a rank sends in a step over its tensor, expert, context and pipeline groups."""
    tokens, width = layout.seq_len / layout.cp, layout.bytes_per_value
    group_size = {"tp": layout.tp, "ep": layout.ep, "cp": layout.cp}
    share = {group: (size - 1) / size for group, size in group_size.items()}
    per_microbatch = dict.fromkeys(("tp", "ep", "cp", "pp"), 0.0)
    for layer, count in _kinds(hf, sizes, layers):
        for message in sizes.layer_messages(hf, layer, width, etp=layout.etp):
            again = layout.recompute == "full" or (layout.recompute == "moe" and message.moe)
            payload = (2 if again else 1) * message.forward + message.backward
            rows = tokens / (layout.tp if message.split == "sp" else 1)
            # Keys of all ranks: everybody receives the whole stream.
            everyone = layout.cp if message.name.startswith("compressed keys") else 1
            per_microbatch[message.group] += count * payload * rows * everyone * share[message.group]
    hidden = hf.hidden_size * width * tokens
    per_microbatch["tp"] += hidden * share["tp"] * (2 * first + 3 * last)
    streams = hf.hc_mult * hidden / layout.tp
    per_microbatch["pp"] = streams * ((not last) + (not first))
    return {group: sent * layout.microbatches for group, sent in per_microbatch.items()}


def seconds(hf: Any, sizes: Any, layout: Layout, every: list[Stage]) -> float:
    """A rough time of a step: compute with the pipeline's bubble, and wires that nothing hides."""
    recomputed = 4 if layout.recompute == "full" else 3
    forward = sizes.forward_flops(hf, (layout.seq_len,))
    work = forward * recomputed * layout.batch / layout.gpus / COMPUTE_RATE
    bubble = 1 + (layout.pp - 1) / layout.microbatches
    # Megatron's order: tensor, context, expert and data, pipeline ranks, neighbours first.
    reach = {
        "tp": layout.tp,
        "cp": layout.tp * layout.cp,
        "ep": layout.etp * layout.ep,
        "dp": layout.gpus // layout.pp,
    }
    reach["pp"] = layout.gpus if layout.pp > 1 else 1
    rate = {group: NODE_RATE if span <= GPUS_PER_NODE else NETWORK_RATE for group, span in reach.items()}
    wires = max(sum(sent / rate[group] for group, sent in stage.sent.items()) for stage in every)
    return work * bubble + wires


def candidates(hf: Any, given: Layout, fixed: frozenset[str]) -> Iterator[Layout]:
    """Layouts for the same job, with the sizes in `fixed` as they are given; powers of two and the divisors of gpus."""
    sizes = [size for size in range(1, given.gpus + 1) if given.gpus % size == 0]

    def options(name: str, limit: int) -> list[int]:
        return [getattr(given, name)] if name in fixed else [size for size in sizes if size <= limit]

    recomputes = [given.recompute] if "recompute" in fixed else list(RECOMPUTE)
    for tp in options("tp", GPUS_PER_NODE):
        for pp in options("pp", hf.num_layers // 2):
            for cp in options("cp", 16):
                for ep in options("ep", hf.num_experts):
                    for recompute in recomputes:
                        layout = replace(given, tp=tp, pp=pp, cp=cp, ep=ep, recompute=recompute)
                        if all(value >= 1 and holds(value) for _, value, holds, _ in _rules(hf, layout)):
                            yield layout


def suggest(
    hf: Any, sizes: Any, given: Layout, fixed: frozenset[str], memory_gb: float = DEVICE_GB
) -> Layout | None:
    """The layout that fits into memory with the least estimated time; None if none fits."""
    best, least = None, math.inf
    for layout in candidates(hf, given, fixed):
        every = stages(hf, sizes, layout)
        if max(stage.total for stage in every) > memory_gb * GB:
            continue
        if (time := seconds(hf, sizes, layout, every)) < least:
            best, least = layout, time
    return best


def text(hf: Any, sizes: Any, layout: Layout) -> str:
    """The plan in words and two tables; the fullest stage counts."""
    every = stages(hf, sizes, layout)
    lines = [
        f"tp {layout.tp}  pp {layout.pp}  ep {layout.ep}  etp {layout.etp}  cp {layout.cp}  dp {layout.dp}  "
        f"recompute {layout.recompute}  microbatches {layout.microbatches} x {layout.seq_len} tokens",
        "",
        "GB per rank",
        f"{'stage':>5} {'layers':>8} {'weights':>8} {'grads':>8} {'optim':>8} {'activ':>8} {'total':>8}",
    ]
    for index, stage in enumerate(every):
        parts = (stage.parameters, stage.gradients, stage.optimizer, stage.activations, stage.total)
        span = f"{stage.layers.start}-{stage.layers.stop - 1}"
        lines.append(f"{index:>5} {span:>8} " + " ".join(f"{part / GB:>8.1f}" for part in parts))
    groups = ("tp", "ep", "cp", "pp", "dp")
    lines += [
        "",
        "GB sent per rank and step, over each group",
        " ".join(f"{group:>8}" for group in ("stage", *groups)),
    ]
    for index, stage in enumerate(every):
        lines.append(f"{index:>8} " + " ".join(f"{stage.sent[group] / GB:>8.1f}" for group in groups))
    return "\n".join(lines)


def flags(hf: Any, layout: Layout) -> list[str]:
    """Megatron's flags for the layout."""
    pairs = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
        "--expert-model-parallel-size": layout.ep,
        "--expert-tensor-parallel-size": layout.etp,
    }
    parts = stage_layers(hf.num_layers, layout.pp)
    if len({len(part) for part in parts}) > 1:
        pairs["--decoder-first-pipeline-num-layers"] = len(parts[0])
        pairs["--decoder-last-pipeline-num-layers"] = len(parts[-1])
    words = [f"{flag} {value}" for flag, value in pairs.items()]
    words += ["--sequence-parallel"] if layout.tp > 1 else []
    words += ["--use-distributed-optimizer"]
    if layout.recompute == "full":
        words += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif layout.recompute == "moe":
        words += ["--recompute-granularity selective", "--recompute-modules moe"]
    return words
