# SPDX-License-Identifier: Apache-2.0
"""Every kernel under compute-sanitizer, on small inputs: `python tests/sanitize.py [memcheck] [racecheck]`.

memcheck finds accesses outside of allocations, racecheck hazards between threads in shared memory. Both run the tests
of `kernels/test_proofs.py` that put garbage around every tensor; without tools' names both run, one after the other.
Torch's own kernels are left out. Needs a CUDA device and compute-sanitizer on the PATH.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

TOOLS = ("memcheck", "racecheck")


def main(tools: list[str]) -> int:
    """1 when a tool reports an error."""
    proofs = Path(__file__).parent / "kernels" / "test_proofs.py"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = [*pytest, "-m", "gpu", "-k", "not_its_own", str(proofs)]
    # Compiled beforehand, in as many processes as there are cores: the tools slow compilation down as well.
    workers = ["-n", "auto"] if find_spec("xdist") else []
    subprocess.run([*tests, *workers], check=True, stdout=subprocess.DEVNULL)
    # One allocation per tensor, so that its ends are the ends of memory.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = []
    for tool in tools or TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        command += ["--kernel-regex-exclude", "kns=at6native"]
        run = subprocess.run([*command, *tests], env=environment, capture_output=True, text=True, check=False)
        lines = run.stdout.splitlines() + run.stderr.splitlines()
        reports = [line for line in lines if line.startswith("=========")]
        print(
            f"{tool}: exit {run.returncode}; {lines[-1] if lines else ''}; {reports[-1] if reports else ''}"
        )
        if run.returncode:
            print("\n".join([*reports[:60], *lines[-15:]]))
            failed.append(tool)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
