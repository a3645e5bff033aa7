# SPDX-License-Identifier: Apache-2.0
"""Runs the registry beside its peers: one line per case and peer, and a JSON and CSV record for each (see README.md).

One process per peer and share of the cases. All of them compile and compare at the same time; then they time, one after
the other, so that nothing else runs on the device.
"""

import argparse
import csv
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch
from gate import report as gate_report
from measure import Checked, Record, ceilings, check, implemented, measure, words
from models import Scale
from peers import NAMES, Peer
from problem import Case
from process import Child, Wanted, say
from registry import cases

SLOW = (
    "eager",
    "cudnn",
    "tilelang",
    "tilekernels",
)  # compile for long, and share their cases among processes
LARGE = ("eager", "flashmla", "cudnn")  # have something to compare with at 128k tokens; those cases come last
WRITING = threading.Lock()


def main() -> int:
    """Command line; 1 when one of our results failed or is not there."""
    options = arguments()
    if options.gate:
        print(gate_report(json.loads(Path(options.gate).read_text())))
        return 0
    if options.child:
        return child(options)
    begin = time.monotonic()
    children = [
        Child(word, f"{share}/{shares}", options)
        for word in options.peer
        for shares in [options.shares if Wanted.parse(word).name in SLOW else 1]
        for share in range(shares)
    ]
    children += [Child(word, "large/1", options) for word in options.peer if Wanted.parse(word).name in LARGE]
    late = begin + options.prepare + 15
    for each in children:
        each.until("ready", late)
    print(f"prepared in {time.monotonic() - begin:.0f} s", flush=True)
    records: list[Record] = []
    # One process times at a time on each device.
    devices = sorted({each.wanted.device for each in children})
    queues = [
        threading.Thread(
            target=collect,
            args=([c for c in children if c.wanted.device == device], device, len(devices), records, options),
        )
        for device in devices
    ]
    for each in queues:
        each.start()
    for each in queues:
        each.join()
    print(f"{len(records)} records in {time.monotonic() - begin:.0f} s")
    return int(any(record["failure"] for record in records))


def collect(
    children: list[Child], device: str, devices: int, records: list[Record], options: argparse.Namespace
) -> None:
    """The records of the processes on one device, one after the other, written as they come."""
    while options.hold and not (Path(options.hold) / device).exists():
        time.sleep(0.2)
    deadline = time.monotonic() + options.seconds
    where = context(options)
    if devices > 1:
        where["device"] += f", number {device} of {devices} in one host"
    for each in children:
        for record in each.records(deadline):
            with WRITING:
                records.append(record | where)
                print(line(record), flush=True)
                if options.out:
                    write(sort(records), Path(options.out))


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, in Triton's interpreter")
    add("--peer", action="append", default=[], metavar="NAME[@DEVICE][=PATH:PATH]", help=", ".join(NAMES))
    add("--only", default="", help="cases whose 'op shape' holds this text")
    add("--rows", type=int, default=4096)
    add("--context", type=int, default=16384)
    add("--tokens", type=int, default=65536, help="of the small operations; hyper-connections take a quarter")
    add("--repeats", type=int, default=30)
    add("--shares", type=int, default=4, help="processes for each peer that compiles slowly")
    add(
        "--prepare", type=float, default=600.0, help="compile and compare no further case after these seconds"
    )
    add("--seconds", type=float, default=3600.0, help="for the timing")
    add(
        "--hold",
        metavar="FOLDER",
        help="time on device N only when FOLDER/N exists: someone else has it until then",
    )
    add("--commit", default="", help="default: git describe")
    add("--out", help="JSON file; the CSV file lies beside it")
    add("--gate", metavar="JSON", help="only print which acceptance targets these records meet")
    add("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.peer = options.peer or ["eager"]
    for word in options.peer:
        if Wanted.parse(word).name not in NAMES:
            raise SystemExit(f"run.py: --peer {word}: expected one of {', '.join(NAMES)}")
    if options.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("run.py: --device cpu needs TRITON_INTERPRET=1 in the environment")
    return options


def child(options: argparse.Namespace) -> int:
    """Checks, waits for its turn, times."""
    begin = time.monotonic()
    share, shares, word = options.child.split("/", 2)
    wanted = Wanted.parse(word)
    alone = wanted.name == "eager"
    scale = scale_of(options)
    peer = cast(Peer, importlib.import_module(f"peers.{wanted.name}"))
    try:
        peer.load(wanted.paths)
    except Exception as failure:  # libraries that do not fit raise all kinds of errors
        print(f"absent: {wanted.name} is not installed: {words(failure)}", flush=True)
        return 0
    chosen = [case for case in cases() if options.only in case.name and implemented(case)]
    chosen = [case for case in chosen if peer.OPS is None or case.op in peer.OPS]
    large = share == "large"
    mine = [case for case in chosen if case.large == large][0 if large else int(share) :: int(shares)]
    checked = []
    for case in mine:
        if time.monotonic() - begin > options.prepare:
            print(f"left out, no time: {case.name}", flush=True)
            continue
        checked.append(attempt(case, peer, scale, alone))
        free(scale)
    say({"ready": True})
    sys.stdin.readline()
    if alone and share == "0":
        for record in ceilings(scale, options.repeats):
            say({"record": record})
    for each in checked:
        for record in measure(each, peer, scale, options.repeats, alone):
            say({"record": record})
        free(scale)
    return 0


def attempt(case: Case, peer: Peer, scale: Scale, alone: bool) -> Checked:
    """The check; a problem that cannot be made is a failure of every direction."""
    try:
        return check(case, peer, scale, alone)
    except Exception as failure:
        return Checked(case, failures=dict.fromkeys(case.directions, words(failure)))


def free(scale: Scale) -> None:
    """Gives the memory back: other processes share the device."""
    if scale.device == "cuda":
        torch.cuda.empty_cache()


def scale_of(options: argparse.Namespace) -> Scale:
    """Full size on a device; on the CPU a few rows of narrow models in float32."""
    if options.device == "cuda":
        return Scale("cuda", torch.bfloat16, options.rows, options.context, options.tokens)
    return Scale("cpu", torch.float32, 3, 16, 16, tiny=True)


def context(options: argparse.Namespace) -> dict[str, Any]:
    """Where the numbers come from."""
    import triton

    cuda = options.device == "cuda"
    describe = ["git", "describe", "--always", "--dirty"]
    commit = (
        options.commit or subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    )
    # File names without their folders, which mean nothing elsewhere.
    command = [word if "=" in word else Path(word).name for word in sys.argv[1:]]
    return {
        "commit": commit or "unknown",
        "device": torch.cuda.get_device_name() if cuda else "cpu, interpreter",
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "command": " ".join(["run.py", *(word.partition("=")[0] for word in command)]),
    }


def sort(records: list[Record]) -> list[Record]:
    """In the order of the registry, ours without a peer first, then the peers as they are named."""
    order = {(case.op, case.shape): place for place, case in enumerate(cases())}
    return sorted(
        records,
        key=lambda r: (order.get((r["op"], r["shape"]), -1), r["direction"] != "fwd", r["direction"], r["peer"] or ""),
    )  # fmt: skip


def write(records: list[Record], path: Path) -> None:
    """JSON and CSV, each written beside and renamed."""
    for file, text in (
        (path, json.dumps(records, indent=1) + "\n"),
        (path.with_suffix(".csv"), table(records)),
    ):
        partial = file.with_suffix(file.suffix + ".part")
        partial.write_text(text)
        partial.replace(file)


def table(records: list[Record]) -> str:
    """The same as comma-separated values; versions as `name version`."""
    import io

    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        versions = " ".join(f"{name} {version}" for name, version in record["versions"].items())
        writer.writerow(record | {"versions": versions})
    return out.getvalue()


def line(record: Record) -> str:
    """Error and speed, ours and theirs."""
    label = f"{record['op']:19s} {record['shape']:27s} {record['direction']:14s}"
    if record["failure"]:
        return f"{label} FAILED {record['failure']}"
    text = f"{label} {record['ours_ms']:8.3f} ms {record['rate']:6.0f} {record['unit']:7s} "
    text += f"error {number(record['rel_error'])} {record['peak_mib']:6.0f} MiB"
    if record["peer"]:
        text += f" | {record['peer']} {record['variant']} {record['peer_ms']:.3f} ms, error "
        text += f"{number(record['peer_error'])}, {record['peer_peak_mib']:.0f} MiB: {record['ratio']:.2f}x"
    return text


def number(error: float | None) -> str:
    """An error, short."""
    return "-" if error is None else f"{error:.1e}"


if __name__ == "__main__":
    sys.exit(main())
