# SPDX-License-Identifier: Apache-2.0
"""The acceptance targets, and which of them a set of records meets.

A target is a floor on peer time / our time for every shape of an operation, on a rate, or on a rate as a share of what
the device reached in the same run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """Floors for some operations in some directions; `shapes` is text that the shape holds, `but` that it does not."""

    ops: tuple[str, ...]
    directions: tuple[str, ...] = ("fwd", "bwd")
    shapes: str = ""
    but: str = "128k tokens"
    peers: dict[str, float] = field(default_factory=dict)
    rate: float | None = None  # in the unit of the record
    share: tuple[str, float] | None = None  # (ceiling, share of it)
    summed: tuple[str, str, float] | None = (
        None  # (another operation, peer, floor): of the times of both together
    )
    slower: float | None = None  # at most this many times the mode that is not repeatable


ATTENTION = ("sparse_attention", "sparse_attention_v4")
LOCAL = " heads"
MHC = ("mhc_mixes", "mhc_pre", "mhc_post", "mhc_head")
TARGETS = (
    Target(
        ("indexer_logits",), shapes="bf16", peers={"TileLang": 1.3, "Miles": 1.1, "cuDNN": 0.9},
        share=("bf16 product", 0.6),
    ),
    Target(("indexer_logits",), shapes="fp8", peers={"DeepGEMM": 0.85}, rate=750.0),
    Target(
        ("topk",),
        peers={
            "Miles": 1.2, "SGLang": 0.8, "cuDNN deterministic": 0.8, "torch.topk": 5.0,
        },
    ),
    Target(("indexer_scores",), ("bwd",), peers={"TileLang": 3.0, "cuDNN": 1.0}),
    Target(("indexer_kl_target",), ("fwd",), peers={"cuDNN": 0.9}, summed=("indexer_kl_loss", "Megatron", 2.0)),
    Target(ATTENTION, ("fwd",), shapes="picks", peers={"TileLang": 1.5, "FlashMLA": 0.95}, rate=560.0),
    Target(ATTENTION, ("bwd",), shapes="picks", peers={"TileLang": 1.5, "cuDNN": 0.9}, rate=300.0),
    Target((*ATTENTION, "indexer_scores"), ("bwd repeatable",), slower=2.0),
    Target(ATTENTION, shapes=LOCAL, peers={"TileLang": 1.5, "FlashMLA": 1.5}),
    Target(("kpool_select",), ("fwd",), peers={"Miles": 1.3}),
    Target(("gated_pool",), ("fwd",), peers={"Miles": 1.2}, share=("copy", 0.7)),
    Target(("gated_pool",), ("bwd",), peers={"torch": 8.0}, share=("copy", 0.7)),
    Target(
        ("fake_quant_fp8", "fake_quant_fp4", "act_quant", "hadamard"), ("fwd",),
        peers={"TileKernels": 1.0, "DeepSeek act_quant": 1.0}, share=("copy", 0.85),
    ),
    Target(MHC, ("fwd",), peers={"TileKernels": 1.1}, share=("copy", 0.75)),
    Target(MHC, ("bwd",), peers={"TileKernels": 1.1, "Miles": 1.3}, share=("copy", 0.75)),
)  # fmt: skip


def report(records: list[Record]) -> str:
    """One line for every cell of the table that was measured, and how many are met."""
    lines, met = [], 0
    for target in TARGETS:
        for record in records:
            if applies(target, record):
                for what, found, floor in cells(target, record, records):
                    met += found >= floor
                    verdict = "met" if found >= floor else f"short by {100 * (1 - found / floor):.0f} %"
                    label = f"{record['op']} {record['shape']} {record['direction']}"
                    lines.append(f"{label:58s} {what:32s} {found:8.2f} of {floor:7.2f}  {verdict}")
    failed = [
        f"FAILED {r['op']} {r['shape']} {r['direction']}: {r['failure']}" for r in records if r["failure"]
    ]
    return "\n".join([*lines, *failed, f"{met} of {len(lines)} targets met"])


def applies(target: Target, record: Record) -> bool:
    """Whether the target says something about this record."""
    shape = record["shape"]
    return (
        record["op"] in target.ops
        and record["direction"] in target.directions
        and target.shapes in shape
        and target.but not in shape
        and record["failure"] is None
    )


def cells(target: Target, record: Record, records: list[Record]) -> Iterator[tuple[str, float, float]]:
    """(what is compared, found, floor); the rates of an operation are judged once, in its record without a peer."""
    if target.summed and record["peer"] == target.summed[1]:
        op, peer, floor = target.summed
        for other in records:
            same = all(other[key] == record[key] for key in ("shape", "direction", "peer"))
            if same and other["op"] == op and other["failure"] is None:
                times = [record[side] + other[side] for side in ("peer_ms", "ours_ms")]
                yield f"with {op} × {peer}", times[0] / times[1], floor
    if record["peer"] in target.peers:
        yield f"× {record['peer']}", record["ratio"], target.peers[record["peer"]]
    if record["peer"] is not None:
        return
    if target.rate:
        yield record["unit"], record["rate"], target.rate
    if target.share:
        name, share = target.share
        for ceiling in records:
            if (ceiling["op"], ceiling["shape"]) == ("ceiling", name):
                yield f"share of {name}", record["rate"] / ceiling["rate"], share
    if target.slower:
        for other in records:
            same = all(other[key] == record[key] for key in ("op", "shape", "peer"))
            if same and other["direction"] == "bwd" and other["failure"] is None:
                yield "fast mode / repeatable", other["ours_ms"] / record["ours_ms"], 1 / target.slower
