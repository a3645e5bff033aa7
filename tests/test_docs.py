# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the README and of docs/ do what the text says: each `bash` and `python` block is run.

Blocks of one page share a scratch folder and run in order, so that a page can build on its own earlier blocks.
Commands that a person would paste but CI cannot run (a real checkpoint, a download) are fenced as `text`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)

# Commands that CI itself runs, with their own time limits; here it is enough that they exist.
RUN_ELSEWHERE = {
    "./dev verify dsv4": "a step of .ci/run",
    "./dev test": "a step of .ci/run, and the caller of this test",
    "./dev run python examples/train_dsv4_tiny.py": "tests/test_example.py",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, code) of every fenced block that claims to be runnable."""
    found = FENCE.findall(page.read_text())
    return [(language, code) for language, code in found if language in ("bash", "python")]


def test_every_fence_names_its_language() -> None:
    for page in PAGES:
        fences = [line for line in page.read_text().splitlines() if line.startswith("```")]
        assert len(fences) % 2 == 0, f"{page}: a code block is not closed"
        for opening in fences[::2]:
            assert opening[3:] in ("bash", "python", "text", "ini"), (
                f"{page}: {opening!r} is not bash, python or text"
            )


def test_commands_that_run_elsewhere_are_in_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    for command, where in RUN_ELSEWHERE.items():
        if ".ci/run" in where:
            assert command in ci, f"{command!r} is neither run by this test nor by .ci/run"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for language, code in blocks(page):
        if language == "bash":
            lines = [line for line in code.splitlines() if line.split("  #")[0].strip() not in RUN_ELSEWHERE]
            command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
        else:
            command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{page.name}: this block failed\n{code}\n{done.stdout}\n{done.stderr}"
