# SPDX-License-Identifier: Apache-2.0
"""Every check of the workspace as a nox session; ./dev runs them with a pinned nox and uv.

Sessions are thin: what they check lives in `tools/` and in the packages' tests. Environments are filled by `uv sync`
so that a member is tested with its own declared needs only; an undeclared import of a sibling fails here.
"""

import os
import shutil
import sys
from pathlib import Path

import nox

if sys.version_info < (3, 12):
    raise SystemExit(f"noxfile: nox runs on Python {sys.version.split()[0]}, expected >= 3.12; use ./dev nox")

ROOT = Path(__file__).parent
MEMBERS = ["vime-vllm-patch", "vime-kernels", "vime-replay", "vime-convert", "vime-models"]
# "workspace" holds what needs all members at once: the tools' tests, the documentation's code blocks, the example.
PACKAGES = [*MEMBERS, "workspace"]
NOT_HERE = "not gpu and not multi_gpu and not network and not dist and not slow"
# Members that have GPU tests; for these, collecting none is an error.
GPU_MEMBERS = ["vime-kernels", "vime-models"]
BENCHED = [member for member in MEMBERS if (ROOT / "packages" / member / "benchmarks" / "run.py").exists()]

nox.needs_version = ">=2025.11"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "typecheck", "tests", "release_check"]


def sync(session: nox.Session, *args: str) -> None:
    """Fills the session's environment from the workspace, exactly (what is not asked for is removed)."""
    env = {"UV_PROJECT_ENVIRONMENT": session.virtualenv.location, "VIRTUAL_ENV": session.virtualenv.location}
    session.run_install(
        "uv", "sync", "--quiet", "--active", "--no-default-groups", *args, env=env, external=True
    )


def pytest_env() -> dict[str, str]:
    """Few threads a process: the tests are small, and oversubscription makes two cores crawl."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), "TOKENIZERS_PARALLELISM": "false"}


def package_paths() -> str:
    """PYTHONPATH that makes every member importable without installing it."""
    return os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))


@nox.session
def lint(session: nox.Session) -> None:
    """Style, layering, spelling, headers, file budget; resolution equals constraints.txt."""
    sync(session, "--only-group", "lint")
    session.run("ruff", "check", "--no-cache", ".")
    session.run("ruff", "format", "--no-cache", "--check", ".")
    session.run(
        "codespell", "--toml", "pyproject.toml", "packages", "docs", "tools", "README.md", "CONTRIBUTING.md"
    )
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": package_paths()})
    session.run("python", "tools/check_workspace.py")
    session.run("python", "tools/constraints.py", "--check")


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy over the sources of every member."""
    sync(session, "--all-packages", "--all-extras", "--group", "typing")
    for member in MEMBERS:
        session.run("mypy", "-p", member.replace("-", "_"), env={"MYPYPATH": package_paths()})
    session.run("mypy", "--explicit-package-bases", "tools/check_workspace.py", "tools/constraints.py")


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """CPU tests of one package, in an environment with that package's needs only."""
    if package == "workspace":
        sync(session, "--all-packages", "--all-extras", "--group", "test", "--group", "lint")
        paths = ["tests", "tools/tests"]
    else:
        # Only kernels need it: the others declare what they are compared with as an extra.
        oracles = ["--group", "oracles"] if package == "vime-kernels" else []
        sync(session, "--package", package, "--all-extras", "--group", "test", *oracles)
        paths = [f"packages/{package}/tests"]
    session.run("pytest", *paths, "-q", "-m", NOT_HERE, *session.posargs, env=pytest_env())
    session.run("uv", "pip", "check", "--quiet", "--python", session.virtualenv.location, external=True)


@nox.session
def dist_tests(session: nox.Session) -> None:
    """Tests that start several gloo processes on the CPU."""
    sync(session, "--all-packages", "--all-extras", "--group", "test")
    paths = [f"packages/{member}/tests" for member in ("vime-convert", "vime-models")]
    session.run("pytest", *paths, "-q", "-m", "dist", *session.posargs, env=pytest_env())


def cuda_devices() -> int:
    """Devices that the driver lists; no Python package is needed to ask."""
    if not shutil.which("nvidia-smi"):
        return 0
    return sum(line.startswith("GPU ") for line in os.popen("nvidia-smi -L 2>/dev/null"))


def device_python(session: nox.Session, least: int) -> tuple[str, dict[str, str], list[str]]:
    """Interpreter and environment of GPU tests, and pytest's words for several workers; skips with fewer devices.

    With `nox --no-venv` it is the interpreter that runs nox, and nothing is installed: for machines that have torch but
    no network. VIME_REQUIRE_GPU=1 makes a missing device an error.
    """
    if (found := cuda_devices()) < least:
        wanted = "no CUDA device" if not found else f"{found} CUDA device"
        reason = (
            f"{wanted}: nvidia-smi lists fewer than {least}; set VIME_REQUIRE_GPU=1 to make this an error"
        )
        if os.environ.get("VIME_REQUIRE_GPU") == "1":
            session.error(reason)
        session.skip(reason)
    env = pytest_env()
    if session.venv_backend == "none":
        python = sys.executable
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_paths(), os.environ.get("PYTHONPATH")]))
    else:
        sync(session, "--all-packages", "--all-extras", "--group", "test", "--group", "gpu")
        python = "python"
    probe = "import torch; assert torch.cuda.is_available(), f'torch {torch.__version__} sees no CUDA device'"
    session.run(python, "-c", probe, env=env, external=True)
    # Nearly all the time is compilation of kernels, each on one core: share it, where pytest-xdist is there.
    # pytest-benchmark, where that is installed, warns under xdist, and warnings are errors.
    probe = "from importlib.util import find_spec; print(find_spec('xdist') is not None)"
    parallel = str(session.run(python, "-c", probe, external=True, silent=True)).strip() == "True"
    workers = ["-n", str(min(12, os.cpu_count() or 1)), "-p", "no:benchmark"] if parallel else []
    return python, env, workers


@nox.session
def gpu_tests(session: nox.Session) -> None:
    """Tests marked gpu. Skips loudly without a device; VIME_REQUIRE_GPU=1 makes that an error."""
    python, env, workers = device_python(session, 1)
    for member in GPU_MEMBERS:
        tests = f"packages/{member}/tests"
        command = [python, "-m", "pytest", tests, "-q", "-rs", "-m", "gpu and not multi_gpu", *workers]
        # pytest's exit 5 (nothing collected) fails the session: a member listed here has GPU tests.
        session.run(*command, *session.posargs, env=env, external=True)


@nox.session
def multi_gpu_tests(session: nox.Session) -> None:
    """Tests marked multi_gpu, over nccl on 2, 4 and 8 devices as far as there are. Skips loudly with fewer than 2."""
    python, env, workers = device_python(session, 2)
    # One worker per file: the ranks of a file are started once, and several files share the devices.
    spread = [*workers, "--dist", "loadfile"] if workers else []
    tests = "packages/vime-models/tests/multi_gpu"
    # -v: a run that is cut off has said which case failed.
    command = [python, "-m", "pytest", tests, "-v", "-rs", "-m", "multi_gpu", *spread]
    session.run(*command, *session.posargs, env=env, external=True)


def vllm_files(session: nox.Session, *what: str) -> str:
    """Runs the maker of vLLM's wheels and environment; what it prints. Skips where this machine cannot have them."""
    script = ROOT / "packages/vime-vllm-patch/tests/environment.py"
    command = [sys.executable, str(script), *what]
    printed = str(session.run(*command, external=True, silent=True, success_codes=[0, 3])).strip()
    if printed.startswith("no interpreter"):
        session.skip(printed)
    return printed


def vllm_wheels(session: nox.Session) -> str:
    """Folder with the published wheels that the patches are for, downloaded once."""
    folder = str((session.cache_dir / "vllm-wheels").resolve())
    vllm_files(session, "wheels", folder)
    return folder


def vllm_python(session: nox.Session) -> str:
    """Interpreter of an environment with vLLM for CPUs, made once."""
    folder = str((session.cache_dir / "vllm-venv").resolve())
    return vllm_files(session, "venv", folder, vllm_wheels(session))


@nox.session
def patch_check(session: nox.Session) -> None:
    """The vLLM patches on the published wheels: they fit exactly, come off again, and the patched modules work."""
    sync(session, "--package", "vime-vllm-patch", "--group", "test")
    tests = "packages/vime-vllm-patch/tests"
    wheels = vllm_wheels(session)
    env = {**pytest_env(), "VIME_VLLM_WHEELS": wheels}
    session.run("pytest", f"{tests}/patch_check", "-q", "-m", "network", *session.posargs, env=env)
    python = vllm_python(session)
    trees = Path(session.create_tmp()).resolve()
    for version in ("0.32.0", "0.33.0"):
        tree = str(trees / version)
        session.run("python", f"{tests}/environment.py", "unpack", tree, wheels, version)
        session.run("vime-vllm-patch", "apply", "--vllm", tree)
        # No plugins: vllm_tests puts its own into the same environment.
        env = {**pytest_env(), "PYTHONPATH": tree, "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_PLUGINS": ""}
        session.run(python, "-m", "pytest", "-q", f"{tests}/vllm_units", env=env, external=True)


@nox.session
def vllm_tests(session: nox.Session) -> None:
    """A real vLLM server on the CPU, patched, returns the picks that the trainer's model makes."""
    python = vllm_python(session)
    sync(session, "--all-packages", "--all-extras", "--group", "test")
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    where = str(session.run(python, "-c", query, external=True, silent=True)).strip()
    # The environment is kept between runs, the patch may have changed since.
    session.run("vime-vllm-patch", "revert", "--vllm", where)
    session.run("vime-vllm-patch", "apply", "--vllm", where)
    plugins = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", "tests/vllm_plugins"]
    session.run(python, "-m", "pip", *plugins, external=True)
    env = {**pytest_env(), "VIME_VLLM_SERVER_PYTHON": python}
    session.run("pytest", "tests/server", "-q", "-m", "slow", *session.posargs, env=env)


@nox.session
def fuzz(session: nox.Session) -> None:
    """A million broken payloads, a thousand built ones and ten thousand random layouts, against slow oracles."""
    sync(session, "--package", "vime-replay", "--all-extras", "--group", "test")
    session.run(
        "pytest", "packages/vime-replay/tests", "-q", "-m", "slow", *session.posargs, env=pytest_env()
    )


@nox.session
@nox.parametrize("package", BENCHED, ids=BENCHED)
def bench(session: nox.Session, package: str) -> None:
    """Prints a package's benchmark table: ours beside its peers, in one run. Arguments go to its run.py."""
    if package == "vime-kernels" and not cuda_devices() and "cpu" not in session.posargs:
        session.skip(
            "no CUDA device: nvidia-smi lists none; pass -- --device cpu to try the runner on tiny shapes"
        )
    sync(session, "--all-packages", "--all-extras")
    # One core: the numbers are per core, and threads of torch would take the others.
    env = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    session.run("python", f"packages/{package}/benchmarks/run.py", *session.posargs, env=env)


@nox.session
def build(session: nox.Session) -> None:
    """Wheels and source archives of all members into dist/, from their metadata alone."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run(
        "uv", "build", "--quiet", "--all-packages", "--no-sources", "--out-dir", "dist", external=True
    )


@nox.session
def release_check(session: nox.Session) -> None:
    """The built wheels install as users install them, and verify a model away from this tree."""
    build(session)
    sync(session, "--only-group", "release")
    archives = [path for kind in ("*.whl", "*.tar.gz") for path in sorted((ROOT / "dist").glob(kind))]
    session.run("twine", "check", "--strict", *map(str, archives))
    session.run("python", "tools/check_wheels.py", "dist")
    elsewhere = Path(session.create_tmp()).resolve()
    venv = elsewhere / "venv"
    session.run("uv", "venv", "--quiet", "--clear", str(venv), external=True)
    session.run(
        *("uv", "pip", "install", "--quiet", "--python", str(venv), "--find-links", str(ROOT / "dist")),
        *("-c", str(ROOT / "constraints.txt"), "vime-models[dsv4]"),
        external=True,
    )
    session.chdir(elsewhere)
    verify = [
        str(venv / "bin" / "vime-convert"),
        "verify",
        "--model-type",
        "deepseek_v4",
        "--tiny",
        "--quiet",
    ]
    session.run(*verify, "--cases", "1", env=pytest_env(), external=True)
