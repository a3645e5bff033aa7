# SPDX-License-Identifier: Apache-2.0
"""A rank that fails takes the later cases with it, not those that ended before."""

from pathlib import Path

import pytest
from harness import launch

SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from harness import serve

def fails():
    raise ValueError("a planted failure")

serve({{"ends": lambda: 1, "fails": fails, "never": lambda: 2}})
"""


@pytest.mark.dist
def test_a_failing_case_says_why_and_leaves_the_others(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    results = launch(worker, 2, ["ends", "fails", "never"])
    assert results["ends"] == [1, 1]
    for case in ("fails", "never"):
        with pytest.raises(RuntimeError, match=f"{case} did not end: .*ended with 1(.|\n)*a planted failure"):
            results[case]
