# SPDX-License-Identifier: Apache-2.0
"""Every kernel under compute-sanitizer, on small inputs: `python tests/sanitize.py [memcheck] [racecheck]`.

memcheck finds accesses outside of allocations, racecheck hazards between threads in shared memory. Both run the tests
of `kernels/test_proofs.py` that put garbage around every tensor; without tools' names both run, one after the other.
Torch's own kernels are left out. With `--compiled` the kernels are taken from Triton's cache as they are.
Needs a CUDA device and compute-sanitizer on the PATH.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

TOOLS = ("memcheck", "racecheck")


def main(words: list[str]) -> int:
    """1 when a tool reports an error."""
    tools = [word for word in words if word != "--compiled"]
    proofs = Path(__file__).parent / "kernels" / "test_proofs.py"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = [*pytest, "-m", "gpu", "-k", "not_its_own", str(proofs)]
    if "--compiled" not in words:
        # In as many processes as there are cores: compilation inside of the tools would be serial, and slower.
        workers = ["-n", "auto", "-p", "no:benchmark"] if find_spec("xdist") else []
        subprocess.run([*tests, *workers], check=True, stdout=subprocess.DEVNULL)
    # One allocation per tensor, so that its ends are the ends of memory.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = []
    for tool in tools or TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        command += ["--kernel-regex-exclude", "kns=at6native"]
        code = subprocess.run([*command, *tests], env=environment, check=False).returncode
        print(f"{tool}: exit {code}", flush=True)
        failed += [tool] if code else []
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
