# SPDX-License-Identifier: Apache-2.0
"""Several ranks, gloo on the CPU or nccl on GPUs: `launch` in a test starts them, `serve` in their script runs cases.

Importing Megatron takes longer than most cases, so all cases of one world size share one start. On the CPU the script
is imported once and `serve` forks it into the ranks; CUDA does not survive a fork, so there every rank is started on
its own. A case is a function that every rank calls; what the ranks return comes back as a list. Ranks meet in a file,
so no port is taken. When one rank fails, the others would wait for it in a collective for ever: all are killed then,
and so they are when the process that started them dies.
"""

import ctypes
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
from typing import Any, Literal, NoReturn

Device = Literal["cpu", "cuda"]

# In the script: what it was started for.
ORDER: dict[str, Any] = json.loads(os.environ.get("VIME_DIST", "{}"))
DEVICE: Device = ORDER.get("device", "cpu")


def _die_with_parent() -> None:
    """A killed test session leaves no rank behind that waits for another and holds a device."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if ORDER:
    # Before the imports of the script, which take longer than most cases.
    _die_with_parent()


class Results(dict[str, list[Any]]):
    """What the ranks returned, by case. A case that did not end raises what went wrong, when it is asked for.

    Args:
        found: results of the cases that ended.
        trouble: why there are no others.
    """

    def __init__(self, found: Mapping[str, list[Any]], trouble: str) -> None:
        super().__init__(found)
        self.trouble = trouble

    def __missing__(self, case: str) -> list[Any]:
        raise RuntimeError(f"{case} did not end: {self.trouble or 'it was not asked for'}")


def launch(
    worker: Path,
    world: int,
    cases: Sequence[str],
    *args: str | Path,
    timeout: float = 300,
    device: Device = "cpu",
) -> Results:
    """For each case, what the ranks returned, by rank.

    When a rank fails or the time is over, the cases that ended before are still there; asking for another one raises.

    Args:
        worker: script that calls `serve`, after its imports and nothing else.
        world: processes.
        cases: names for which the script has a function, run in this order.
        *args: further words for the script, `sys.argv[1:]`.
        timeout: seconds for all cases together.
        device: "cuda" for nccl with a device per rank.

    Raises:
        RuntimeError: a rank failed after its last case.
    """
    with tempfile.TemporaryDirectory(prefix="vime-dist-") as scratch:
        order = {"world": world, "cases": list(cases), "scratch": scratch, "device": device}
        if device == "cuda":
            orders = [order | {"rank": rank} for rank in range(world)]
        else:
            orders = [order]
        starts = [_start(worker, args, order) for order in orders]
        try:
            outcome = _outcome(starts, timeout)
        finally:
            # The sessions: also ranks that wait for a dead one, and children of ranks.
            for start in starts:
                _kill(start)
        trouble = ""
        if outcome:
            logs = sorted(Path(scratch).glob("*.log"))
            tails = "\n".join(f"--- {log.stem}\n{log.read_text()[-2500:]}" for log in logs)
            trouble = f"{worker.name}, world {world}, cases {', '.join(cases)}: {outcome}\n{tails}"
        ended = {name: Path(scratch) / f"{name}.json" for name in cases}
        found = {name: json.loads(path.read_text()) for name, path in ended.items() if path.exists()}
        if trouble and len(found) == len(ended):
            raise RuntimeError(trouble)
        return Results(found, trouble)


def _start(worker: Path, args: Sequence[str | Path], order: dict[str, Any]) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "VIME_DIST": json.dumps(order),
        "OMP_NUM_THREADS": "1",
        # What Megatron does not find on this machine is not the subject.
        "PYTHONWARNINGS": "ignore",
    }
    # One queue of kernels per device, which Megatron wants with tensor parallelism before Blackwell.
    environment |= (
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if order["device"] == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    )
    with _log(order).open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-u", str(worker), *map(str, args)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _log(order: dict[str, Any]) -> Path:
    return Path(order["scratch"]) / (f"rank{order['rank']}.log" if "rank" in order else "parent.log")


def _outcome(starts: Sequence[subprocess.Popen[bytes]], timeout: float) -> str:
    """What went wrong, in words; empty if all ended well."""
    end = time.monotonic() + timeout
    running = list(starts)
    while running:
        if time.monotonic() > end:
            return f"not done after {timeout} s"
        failed = [start.returncode for start in running if start.poll()]
        if failed:
            return f"ended with {failed[0]}"
        running = [start for start in running if start.returncode is None]
        time.sleep(0.05)
    return ""


def serve(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Runs the cases that `launch` asked for: in this process if it is a rank, else in ranks forked from it.

    Args:
        cases: functions that return something JSON can hold.
    """
    asked = {name: cases[name] for name in ORDER["cases"]}
    if "rank" in ORDER:
        _run_and_exit(ORDER["rank"], asked)
    # The thread pool of a process does not survive a fork, so nothing may have computed yet.
    ranks = {_fork(rank, asked): rank for rank in range(ORDER["world"])}
    while ranks:
        process, status = os.wait()
        if status:
            print(f"rank {ranks[process]} ended with {os.waitstatus_to_exitcode(status)}", flush=True)
            sys.exit(1)
        del ranks[process]


def _fork(rank: int, cases: Mapping[str, Callable[[], Any]]) -> int:
    """In the parent: the new process. The child never returns."""
    if process := os.fork():
        return process
    _die_with_parent()
    log = os.open(_log(ORDER | {"rank": rank}), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _run_and_exit(rank, cases)


def _run_and_exit(rank: int, cases: Mapping[str, Callable[[], Any]]) -> NoReturn:
    """Ends this process at once: Python's own end would wait for nccl, which waits for the other ranks."""
    try:
        _run(rank, cases)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _run(rank: int, cases: Mapping[str, Callable[[], Any]]) -> None:
    import torch
    import torch.distributed as dist

    from vime_models.host import bringup

    torch.set_num_threads(1)
    scratch, world = Path(ORDER["scratch"]), ORDER["world"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    store = dist.FileStore(str(scratch / "meeting"), world)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    for name, case in cases.items():
        start = time.monotonic()
        results: list[Any] = [None] * world
        dist.all_gather_object(results, case())
        if rank == 0:
            # Under another name first: a rank may be killed while it writes.
            part = scratch / f"{name}.part"
            part.write_text(json.dumps(results))
            part.rename(scratch / f"{name}.json")
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    bringup.destroy_world()


def _kill(start: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(start.pid, signal.SIGKILL)
    except ProcessLookupError:  # Everything has ended.
        return
    start.wait()
