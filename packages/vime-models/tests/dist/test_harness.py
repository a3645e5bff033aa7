# SPDX-License-Identifier: Apache-2.0
"""A rank that fails takes the later cases with it, not those that ended before; no rank outlives who started it."""

import fcntl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import launch

HERE = Path(__file__).parent
SCRIPT = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import fcntl
import time
from pathlib import Path
from harness import serve

def fails():
    raise ValueError("a planted failure")

def waits():
    import torch.distributed as dist

    with open(Path(__file__).with_name(f"lock{{dist.get_rank()}}"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("held")
        file.flush()
        time.sleep(300)

serve({{"ends": lambda: 1, "fails": fails, "never": lambda: 2, "waits": waits}})
"""
STARTER = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from harness import launch

launch(Path(sys.argv[1]), 2, ["waits"])
"""

pytestmark = pytest.mark.dist


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    return script


def test_a_failing_case_says_why_and_leaves_the_others(worker: Path) -> None:
    results = launch(worker, 2, ["ends", "fails", "never"])
    assert results["ends"] == [1, 1]
    for case in ("fails", "never"):
        with pytest.raises(RuntimeError, match=f"{case} did not end: .*ended with 1(.|\n)*a planted failure"):
            results[case]


def test_ranks_die_with_the_process_that_started_them(worker: Path) -> None:
    locks = [worker.with_name(f"lock{rank}") for rank in range(2)]
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(worker)])
    try:
        assert comes_true(lambda: all(lock.exists() and lock.read_text() for lock in locks), 120)
        assert not any(map(is_free, locks)), "the premise: the ranks hold their locks"
    finally:
        starter.kill()
        starter.wait()
    assert comes_true(lambda: all(map(is_free, locks)), 10)


def comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def is_free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
