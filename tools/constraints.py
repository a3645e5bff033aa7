# SPDX-License-Identifier: Apache-2.0
"""Writes or checks constraints.txt: the versions that the workspace resolves to, without hosts or hashes.

The lock file itself is not committed because it records index hosts. `--check` resolves afresh and compares.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Versions of the development environment (uv's resolution of this workspace). Written by tools/constraints.py.
# Use: uv pip install -c constraints.txt "vime-models[dsv4]"
"""
EXPORT = [
    *(
        "uv",
        "export",
        "--quiet",
        "--format",
        "requirements-txt",
        "--no-hashes",
        "--no-annotate",
        "--no-header",
    ),
    *("--no-emit-workspace", "--all-packages", "--all-extras", "--all-groups"),
]


def resolved() -> str:
    """The exported resolution as text."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "constraints.txt"
        subprocess.run([*EXPORT, "--output-file", str(out)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return HEADER + out.read_text()


def main(arguments: list[str]) -> int:
    """Writes the file, or with --check prints how it differs and returns 1."""
    path = ROOT / "constraints.txt"
    fresh = resolved()
    if "--check" not in arguments:
        path.write_text(fresh)
        return 0
    committed = path.read_text() if path.exists() else ""
    if committed == fresh:
        return 0
    for line in sorted(set(committed.splitlines()) ^ set(fresh.splitlines())):
        print(("only in constraints.txt: " if line in committed else "only in the resolution: ") + line)
    print("constraints.txt is stale; run: ./dev run python tools/constraints.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
