# SPDX-License-Identifier: Apache-2.0
"""Speed and size of the way from a payload to the queues, each beside a baseline in the same process.

Prints one line per case and writes records (name, ours, baseline, ratio, unit, peak_mib and context). Ratios are ours
over baseline: more is better, except for metrics, where both are seconds. Speeds are GB of int32 per CPU second.
"""

import argparse
import base64
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import pybase64
from record_picks import load_or_record
from timing import Record, best, line, peak_mib, write

from vime_replay import store
from vime_replay.codec import EncodedSource, Encoding, encode_rows
from vime_replay.layout import PackLayout
from vime_replay.metrics import ReplayMetrics
from vime_replay.pack import pack_rows
from vime_replay.rows import decode_rows
from vime_replay.spec import ReplaySpec
from vime_vllm_patch import wire

# DeepSeek-V4-Flash: 21 layers with an indexer, 512 picks among groups of 4 tokens.
FLASH = ReplaySpec("indexer", "rollout_indexer_topk", 21, 512, {2 + 2 * i: i for i in range(21)}, 4)
# Rows per layer and microbatch that metrics compare by default.
CHECK_ROWS = 64


def record(
    name: str, ours: float, baseline: float, baseline_name: str, unit: str, peak: float, **more: Any
) -> Record:
    """One record; `ratio` is ours over baseline."""
    return {
        "name": name,
        "ours": round(ours, 5),
        "baseline": round(baseline, 4),
        "baseline_name": baseline_name,
        "ratio": round(ours / baseline, 5),
        "unit": unit,
        "peak_mib": round(peak, 1),
        **more,
    }


def synthetic(tokens: int, spec: ReplaySpec, *, ordered: bool, seed: int = 0) -> np.ndarray:
    """Complete rows of one sample: all keys while they are few, then a random choice."""
    rng = np.random.default_rng(seed)
    rows = np.full((tokens - 1, spec.num_streams, spec.topk), -1, np.int32)
    for position in range(tokens - 1):
        available = (position + 1) // spec.ratio
        if available <= spec.topk:
            rows[position, :, :available] = np.arange(available)
        else:
            picks = np.argpartition(rng.random((spec.num_streams, available), np.float32), spec.topk, axis=1)
            rows[position] = np.sort(picks[:, : spec.topk], axis=1)
        if not ordered:
            count = min(available, spec.topk)
            rows[position, :, :count] = rng.permuted(rows[position, :, :count], axis=1)
    return rows


def decode(rows: np.ndarray, seconds: float) -> Iterator[Record]:
    """Base64 text to checked rows, beside the standard library and beside base64 alone."""
    text, tokens, gigabytes = wire.encode(rows), len(rows) + 1, rows.nbytes / 1e9

    def stdlib() -> np.ndarray:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)

    calls = {
        "stdlib": stdlib,
        "pybase64": lambda: pybase64.b64decode(text, validate=True),
        "off": lambda: decode_rows(text, FLASH, num_tokens=tokens, level="off"),
        "range": lambda: decode_rows(text, FLASH, num_tokens=tokens, level="range"),
    }
    times = best(calls, seconds)
    for level, meaning in (("off", "bytes and shapes"), ("range", "and every value")):
        peak = peak_mib(calls[level])
        for name in ("stdlib", "pybase64"):
            label = {"stdlib": "base64 + np.load", "pybase64": "pybase64.b64decode alone"}[name]
            yield record(
                f"decode, {meaning}",
                gigabytes / times[level],
                gigabytes / times[name],
                label,
                "GB/s",
                peak,
                encoded_mib=round(len(text) / 2**20, 1),
                decoded_mib=round(rows.nbytes / 2**20, 1),
            )


def pack(seconds: float) -> Iterator[Record]:
    """Rows of samples to one microbatch, beside where + pad + concatenate, which neither checks nor regroups."""
    for given in ("ascending", "unordered"):
        yield from _pack(given, seconds)


def _pack(given: str, seconds: float) -> Iterator[Record]:
    lengths = (5000, 3192)
    layout = PackLayout(lengths, pad_multiple=128)
    samples = [synthetic(n, FLASH, ordered=given == "ascending", seed=n) for n in lengths]
    offsets, gigabytes = layout.key_offsets(FLASH.ratio), sum(rows.nbytes for rows in samples) / 1e9
    out = np.empty((FLASH.num_streams, layout.local_rows, FLASH.topk), np.int32)

    def plain() -> np.ndarray:
        moved = [np.where(r >= 0, r + np.int32(o), r) for r, o in zip(samples, offsets, strict=True)]
        padded = [
            np.pad(r, ((0, end), (0, 0), (0, 0)), constant_values=-1)
            for r, end in zip(moved, (1, 1 + layout.total - sum(lengths)), strict=True)
        ]
        return np.concatenate(padded)

    def plain_sorted() -> np.ndarray:
        rows = plain()
        rows.view(np.uint32).sort(axis=2)
        return rows

    calls = {
        "plain": plain,
        "plain, sorted": plain_sorted,
        "keep": lambda: pack_rows(samples, FLASH, layout, out=out, order="keep"),
        "sorted": lambda: pack_rows(samples, FLASH, layout, out=out),
        "memcpy": lambda: np.copyto(out.reshape(-1)[: samples[0].size], samples[0].reshape(-1)),
    }
    for order, baseline in (("keep", "plain"), ("sorted", "plain, sorted")):
        same = calls[order]().picks_LSK.transpose(1, 0, 2) == calls[baseline]()
        if not same.all():
            raise SystemExit(f"pack: order {order}: expected the rows of the baseline, got others")
    times = best(calls, seconds)
    for order, baseline in (("keep", "plain"), ("sorted", "plain"), ("sorted", "plain, sorted")):
        yield record(
            f"pack + check + rebase, {given}, {order}",
            gigabytes / times[order],
            gigabytes / times[baseline],
            "where + pad + concatenate" + " + sort" * (baseline == "plain, sorted"),
            "GB/s",
            peak_mib(calls[order]),
            memcpy_gb_s=round(samples[0].nbytes / 1e9 / times["memcpy"], 2),
        )


def encodings(picks: np.ndarray, seconds: float) -> Iterator[Record]:
    """Bytes of recorded picks, and the speed of reading them back."""
    streams, topk = picks.shape[1:]
    spec = ReplaySpec("indexer", "rollout_indexer_topk", streams, topk, {i: i for i in range(streams)}, 4)
    for encoding in get_args(Encoding):
        yield from _encoding(picks, spec, encoding, seconds)


def _encoding(picks: np.ndarray, spec: ReplaySpec, encoding: Encoding, seconds: float) -> Iterator[Record]:
    select_all = spec.topk * spec.ratio + spec.ratio - 1
    for tokens in sorted({4096, len(picks) + 1}):
        rows = picks[: tokens - 1]
        blob = encode_rows(rows, spec, encoding)
        yield record(
            f"bytes, {encoding}, {tokens} tokens",
            rows.nbytes / len(blob),
            1.0,
            "int32",
            "x smaller",
            peak_mib(partial(encode_rows, rows, spec, encoding)),
            raw_mib=round(rows.nbytes / 2**20, 1),
            churn=round(churn(rows, spec), 3),
            # Without the first rows, which pick all keys and cost nothing.
            ratio_of_rows_that_choose=round((len(rows) - select_all) * spec.row_nbytes / len(blob), 2),
        )
    blob, layout = encode_rows(picks, spec, encoding), PackLayout((len(picks) + 1,))
    calls = {
        "int32": lambda: pack_rows([picks], spec, layout),
        "pack from": lambda: pack_rows([EncodedSource(blob, spec)], spec, layout),
        "write": lambda: encode_rows(picks, spec, encoding),
    }
    times = best(calls, seconds)
    for name in ("write", "pack from"):
        yield record(
            f"{name} {encoding}",
            picks.nbytes / 1e9 / times[name],
            picks.nbytes / 1e9 / times["int32"],
            "pack from int32 in memory",
            "GB/s",
            peak_mib(calls[name]),
        )


def files(seconds: float) -> Iterator[Record]:
    """A quarter of a sample's streams and rows from a file in the page cache, beside loading all of it."""
    rows = synthetic(4097, FLASH, ordered=True)
    layout = PackLayout((4097,), cp_size=2, cp_rank=1, pad_multiple=128)
    streams = range(5, 15)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "rows"
        store.write_rows(path, rows, FLASH, validated=True)
        np.save(Path(directory) / "rows.npy", rows)

        def ours(io: Any) -> Any:
            source = store.open_rows(path, FLASH, io=io)
            packed = pack_rows([source], FLASH, layout, streams=streams)
            source.close()
            return packed

        def whole() -> Any:
            loaded = np.load(Path(directory) / "rows.npy")
            return pack_rows([loaded], FLASH, layout, streams=streams)

        calls = {"pread": lambda: ours("pread"), "mmap": lambda: ours("mmap"), "whole": whole}
        times = best(calls, seconds)
        for io in ("pread", "mmap"):
            yield record(
                f"read 10 of 21 streams, 1 of 2 ranks, {io}",
                1 / times[io],
                1 / times["whole"],
                "np.load, then pack",
                "samples/s",
                peak_mib(calls[io]),
            )


def metrics(picks: np.ndarray, forward_seconds: float, seconds: float) -> Iterator[Record]:
    """Seconds that comparisons take at default sampling, beside a forward pass alone, the least that a step takes."""
    streams = picks.shape[1]
    rows = np.linspace(0, len(picks) - 1, CHECK_ROWS).astype(np.int64)
    replayed, fresh = picks[rows], np.roll(picks, 1, axis=0)[rows]
    available, lengths = (rows + 1) // 4, np.full(CHECK_ROWS, len(picks) + 1)

    def compare() -> None:
        found = ReplayMetrics(range(streams))
        for layer in range(streams):
            found.add(
                layer,
                fresh[:, layer],
                replayed[:, layer],
                available=available,
                positions=rows,
                lengths=lengths,
            )
        found.values(detail=True)

    taken = best({"compare": compare}, seconds)["compare"]
    yield record(
        f"metrics of a step, {streams} layers x {CHECK_ROWS} rows",
        taken,
        forward_seconds,
        "forward of the tiny model",
        "s",
        peak_mib(compare),
    )


def churn(rows: np.ndarray, spec: ReplaySpec) -> float:
    """Share of a row's picks that the row before did not have, over rows that choose."""
    first = spec.topk * spec.ratio + spec.ratio
    sampled = range(first, len(rows), max(1, (len(rows) - first) // 200))
    new = [np.setdiff1d(rows[r, s], rows[r - 1, s]).size for r in sampled for s in range(spec.num_streams)]
    return float(np.mean(new)) / spec.topk


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    parser.add_argument("--picks", type=Path, help="output of record_picks.py; recorded anew if not given")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="of the recorded sample (default %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="per case (default %(default)s)")
    options = parser.parse_args()
    records: list[Record] = []

    def add(cases: Iterator[Record]) -> None:
        for found in cases:
            records.append(found)
            print(line(found), flush=True)

    add(decode(synthetic(8193, FLASH, ordered=False), options.seconds))
    add(pack(options.seconds))
    add(files(options.seconds))
    picks, forward_seconds = load_or_record(options.picks, options.tokens)
    add(encodings(picks, options.seconds))
    add(metrics(picks, forward_seconds, options.seconds))
    if options.out:
        write(records, options.out)


if __name__ == "__main__":
    main()
