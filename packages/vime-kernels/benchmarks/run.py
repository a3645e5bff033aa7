# SPDX-License-Identifier: Apache-2.0
"""Runs the registry beside its peers: one line per case and peer, and a JSON and CSV record for each (see README.md).

One process per peer and share of the cases. All of them compile and compare at the same time; then they time, one after
the other, so that nothing else runs on the device.
"""

import argparse
import contextlib
import csv
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch
from gate import report as gate_report
from measure import Record, ceilings, check, implemented, measure, words
from models import Scale
from peers import NAMES, Peer
from problem import Case
from registry import cases

SLOW = (
    "eager",
    "cudnn",
    "tilelang",
    "tilekernels",
)  # compile for long, and share their cases among processes
MARK = "@@"  # in front of what a child says to its parent


def main() -> int:
    """Command line; 1 when one of our results failed or is not there."""
    options = arguments()
    if options.gate:
        print(gate_report(json.loads(Path(options.gate).read_text())))
        return 0
    if options.child:
        return child(options)
    options.begin = time.monotonic()
    children = [
        Child(word, share, shares, options)
        for word in options.peer
        for shares in [options.shares if word.partition("=")[0] in SLOW else 1]
        for share in range(shares)
    ]
    for each in children:
        each.until("ready", options.begin + options.prepare + 60)
    print(f"prepared in {time.monotonic() - options.begin:.0f} s", flush=True)
    records: list[Record] = []
    for each in children:
        each.go()
        for record in each.records(options.begin + options.seconds):
            records.append(record | context(options))
            print(line(record), flush=True)
        if options.out:
            write(sort(records), Path(options.out))
    print(f"{len(records)} records in {time.monotonic() - options.begin:.0f} s")
    return int(any(record["failure"] for record in records))


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, in Triton's interpreter")
    add("--peer", action="append", default=[], metavar="NAME[=PATH[:PATH]]", help=f"of {', '.join(NAMES)}")
    add("--only", default="", help="cases whose 'op shape' holds this text")
    add("--rows", type=int, default=4096)
    add("--context", type=int, default=16384)
    add("--tokens", type=int, default=65536, help="of the small operations; hyper-connections take a quarter")
    add("--repeats", type=int, default=30)
    add("--shares", type=int, default=4, help="processes for each peer that compiles slowly")
    add(
        "--prepare", type=float, default=600.0, help="compile and compare no further case after these seconds"
    )
    add("--seconds", type=float, default=3600.0, help="for everything")
    add("--commit", default="", help="default: git describe")
    add("--out", help="JSON file; the CSV file lies beside it")
    add("--gate", metavar="JSON", help="only print which acceptance targets these records meet")
    add("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.peer = options.peer or ["eager"]
    for word in options.peer:
        if word.partition("=")[0] not in NAMES:
            raise SystemExit(f"run.py: --peer {word}: expected one of {', '.join(NAMES)}")
    if options.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("run.py: --device cpu needs TRITON_INTERPRET=1 in the environment")
    return options


class Child:
    """A process that measures one peer on its share of the cases."""

    def __init__(self, peer: str, share: int, shares: int, options: argparse.Namespace) -> None:
        self.label = f"{peer.partition('=')[0]} {share + 1}/{shares}"
        paths = peer.partition("=")[2]
        folders = [path for path in paths.split(":") if path and not path.endswith(".so")]
        environment = os.environ | {
            "PYTHONPATH": ":".join([*folders, os.environ.get("PYTHONPATH", "")]).strip(":")
        }
        command = [sys.executable, *sys.argv, "--child", f"{share}/{shares}/{peer}"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith(MARK):
                self.said.put(json.loads(text[len(MARK) :]))
            elif text.startswith(("absent", "left out", "miles:")):
                print(f"{self.label}: {text.rstrip()}", flush=True)
        self.said.put(None)

    def until(self, word: str, deadline: float) -> Record | None:
        """The next message with this word; None when the process ended or the time is up."""
        while not self.ended:
            try:
                message = self.said.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                print(f"{self.label}: out of time, stopped", flush=True)
                self.process.kill()
                message = None
            if message is None:
                self.ended = True
            elif word in message:
                return message
        return None

    def go(self) -> None:
        """Lets it time."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.close()

    def records(self, deadline: float) -> list[Record]:
        """What it measured."""
        found = []
        while (message := self.until("record", deadline)) is not None:
            found.append(message["record"])
        return found


def child(options: argparse.Namespace) -> int:
    """Checks, waits for its turn, times."""
    begin = time.monotonic()
    share, shares, word = options.child.split("/", 2)
    name, _, paths = word.partition("=")
    scale = scale_of(options)
    peer = cast(Peer, importlib.import_module(f"peers.{name}"))
    try:
        peer.load([path for path in paths.split(":") if path])
    except Exception as failure:  # libraries that do not fit raise all kinds of errors
        print(f"absent: {name} is not installed: {words(failure)}", flush=True)
        return 0
    chosen = [case for case in cases() if options.only in case.name and implemented(case)]
    chosen = [case for case in chosen if peer.OPS is None or case.op in peer.OPS]
    checked = []
    for case in chosen[int(share) :: int(shares)]:
        if time.monotonic() - begin > options.prepare:
            print(f"left out, no time: {case.name}", flush=True)
            continue
        checked.append(attempt(case, peer, scale))
        free(scale)
    say({"ready": True})
    sys.stdin.readline()
    if name == "eager" and share == "0":
        for record in ceilings(scale, options.repeats):
            say({"record": record})
    for each in checked:
        for record in measure(each, peer, scale, options.repeats, alone=name == "eager"):
            say({"record": record})
        free(scale)
    return 0


def attempt(case: Case, peer: Peer, scale: Scale) -> Any:
    """The check; a problem that cannot be made is a failure of every direction."""
    from measure import Checked

    try:
        return check(case, peer, scale)
    except Exception as failure:
        return Checked(case, failures=dict.fromkeys(case.directions, words(failure)))


def free(scale: Scale) -> None:
    """Gives the memory back: other processes share the device."""
    if scale.device == "cuda":
        torch.cuda.empty_cache()


def say(message: dict[str, Any]) -> None:
    """One message to the parent."""
    print(f"{MARK}{json.dumps(message)}", flush=True)


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
