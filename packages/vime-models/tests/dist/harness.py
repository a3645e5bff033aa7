# SPDX-License-Identifier: Apache-2.0
"""Several gloo processes on the CPU: `launch` in a test starts them, `serve` in their script runs the cases.

Importing Megatron takes longer than most cases. So all cases of one world size share one start, and the script is
imported once: `serve` forks it into the ranks. A case is a function that every rank calls; what the ranks return
comes back as a list. Ranks meet in a file, so no port is taken. When one rank fails, the others would wait for it in
a collective for ever: all are killed then.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def launch(
    worker: Path, world: int, cases: Sequence[str], *args: str | Path, timeout: float = 300
) -> dict[str, list[Any]]:
    """For each case, what the ranks returned, by rank.

    Args:
        worker: script that calls `serve`, after its imports and nothing else.
        world: processes.
        cases: names for which the script has a function, run in this order.
        *args: further words for the script, `sys.argv[1:]`.
        timeout: seconds for all cases together.

    Raises:
        RuntimeError: a rank failed, or the time is over; with the end of what the ranks printed.
    """
    with tempfile.TemporaryDirectory(prefix="vime-dist-") as scratch:
        environment = os.environ | {
            "VIME_DIST": json.dumps({"world": world, "cases": list(cases), "scratch": scratch}),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # What Megatron does not find on a CPU is not the subject.
            "PYTHONWARNINGS": "ignore",
        }
        logs = [Path(scratch) / name for name in ("parent", *(f"rank{rank}" for rank in range(world)))]
        with logs[0].open("wb") as output:
            parent = subprocess.Popen(
                [sys.executable, "-u", str(worker), *map(str, args)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            trouble = "" if (code := parent.wait(timeout)) == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            trouble = f"not done after {timeout} s"
        finally:
            # The session: also ranks that wait for a dead one, and children of ranks.
            _kill(parent)
        if trouble:
            tails = "\n".join(f"--- {log.name}\n{log.read_text()[-2500:]}" for log in logs if log.exists())
            raise RuntimeError(f"{worker.name}, world {world}, cases {', '.join(cases)}: {trouble}\n{tails}")
        return {name: json.loads((Path(scratch) / f"{name}.json").read_text()) for name in cases}


def serve(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Forks into the ranks, which run the cases that `launch` asked for.

    Args:
        cases: functions that return something JSON can hold.
    """
    order = json.loads(os.environ["VIME_DIST"])
    # The thread pool of a process does not survive a fork, so nothing may have computed yet.
    ranks = {_fork(rank, order, cases): rank for rank in range(order["world"])}
    while ranks:
        process, status = os.wait()
        if status:
            print(f"rank {ranks[process]} ended with {os.waitstatus_to_exitcode(status)}", flush=True)
            sys.exit(1)
        del ranks[process]


def _fork(rank: int, order: dict[str, Any], cases: Mapping[str, Callable[[], Any]]) -> int:
    """In the parent: the new process. The child never returns."""
    if process := os.fork():
        return process
    scratch = Path(order["scratch"])
    log = os.open(scratch / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _run(rank, order["world"], scratch, {name: cases[name] for name in order["cases"]})
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _run(rank: int, world: int, scratch: Path, cases: Mapping[str, Callable[[], Any]]) -> None:
    import torch
    import torch.distributed as dist

    from vime_models.host import bringup

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    store = dist.FileStore(str(scratch / "meeting"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name, case in cases.items():
        start = time.monotonic()
        results: list[Any] = [None] * world
        dist.all_gather_object(results, case())
        if rank == 0:
            (scratch / f"{name}.json").write_text(json.dumps(results))
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    bringup.destroy_world()


def _kill(parent: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(parent.pid, signal.SIGKILL)
    except ProcessLookupError:  # Everything has ended.
        return
    parent.wait()
