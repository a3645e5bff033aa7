# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks measure: the fastest of runs that take turns, and the memory that a call adds."""

import json
import os
import platform
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Record = dict[str, Any]
PACKAGES = ("numpy", "pybase64", "zstandard", "vime-replay")


def best(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """CPU seconds of the fastest run of each call. Calls take turns, and waiting for a core costs nothing."""
    fastest = dict.fromkeys(calls, float("inf"))
    begin, rounds = time.perf_counter(), 0
    while rounds < 5 or time.perf_counter() - begin < seconds:
        for name, call in calls.items():
            start = time.process_time()
            call()
            fastest[name] = min(fastest[name], time.process_time() - start)
        rounds += 1
    return fastest


def peak_mib(call: Callable[[], Any]) -> float:
    """Most memory that a call holds at a time beyond what was there, its result included."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def line(record: Record) -> str:
    """A record as one line of the table."""
    return (
        f"{record['name']:<34} {record['ours']:>9.3f} {record['unit']:<10} {record['baseline_name']:<28} "
        f"{record['baseline']:>9.3f}  ratio {record['ratio']:>7.2f}  peak {record['peak_mib']:>7.1f} MiB"
    )


def context() -> dict[str, Any]:
    """Machine, versions, commit and command."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "machine": f"{_cpu()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "commit": commit.stdout.strip() or "unknown",
        # Names of files without the folders of this machine.
        "command": " ".join(["python benchmarks/run.py", *(Path(word).name for word in sys.argv[1:])]),
    }


def write(records: list[Record], path: Path) -> None:
    """Writes records with their context, one object each."""
    facts = context()
    path.write_text(json.dumps([record | facts for record in records], indent=1) + "\n")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((x.partition(": ")[2] for x in lines if x.startswith("model name")), platform.machine())
