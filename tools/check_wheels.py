# SPDX-License-Identifier: Apache-2.0
"""Checks what the built wheels contain: typing marker, licence, credits, no tests, metadata without hosts."""

import sys
import zipfile
from pathlib import Path

EXPECTED = 5


def wheel_problems(path: Path) -> list[str]:
    """Faults of one wheel, one sentence each."""
    module = path.name.split("-")[0]
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
    expected = (f"{module}/py.typed", ".dist-info/licenses/LICENSE", ".dist-info/licenses/NOTICE")
    found = [f"{path.name}: {end} is missing" for end in expected if not any(n.endswith(end) for n in names)]
    strays = [n for n in names if not n.startswith((f"{module}/", f"{module}-"))]
    if strays:
        found.append(f"{path.name}: files outside the package: {strays[:3]}")
    if any("/tests/" in name for name in names):
        found.append(f"{path.name}: contains tests")
    if "vllm>" in metadata or "vllm=" in metadata:
        found.append(f"{path.name}: its metadata requires vllm")
    if " @ " in metadata:
        found.append(f"{path.name}: its metadata has a direct reference")
    return found


def main(arguments: list[str]) -> int:
    """Prints the faults of all wheels in the given folder; 1 if there is any."""
    wheels = sorted(Path(arguments[0]).glob("*.whl"))
    found = [] if len(wheels) == EXPECTED else [f"expected {EXPECTED} wheels, found {len(wheels)}"]
    for wheel in wheels:
        found += wheel_problems(wheel)
    for sentence in found:
        print(sentence)
    print(f"check_wheels: {len(wheels)} wheel(s), {len(found)} problem(s)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
