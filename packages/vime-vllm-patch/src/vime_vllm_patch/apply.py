# SPDX-License-Identifier: Apache-2.0
"""The verbs that change a vLLM tree: every file or none, and back byte for byte.

New files are written beside the old ones and renamed over them: installers link site-packages to a shared cache, and
writing in place would change the cache. The receipt and the originals are stored before the first rename, so that
`revert` can put back a tree that was cut off half-way. Left out: finding out what a tree is (`tree.py`).
"""

import ast
import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from vime_vllm_patch import __version__, diff
from vime_vllm_patch.errors import PatchError
from vime_vllm_patch.manifest import PATCH, sha256
from vime_vllm_patch.tree import ORIGINALS, RECEIPT, STAMP, Findings, Receipt, Tree

_BESIDE = ".vime-new"
# Class, field and file that a patched vLLM must have.
PROVIDES = (
    ("vllm/config/aux_output.py", "AuxOutputConfig", "enable_return_indexer_topk"),
    ("vllm/engine/arg_utils.py", "EngineArgs", "enable_return_indexer_topk"),
    ("vllm/sampling_params.py", "SamplingParams", "indexer_topk_prompt_start"),
    ("vllm/sampling_params.py", "SamplingParams", "return_indexer_topk"),
    ("vllm/outputs.py", "CompletionOutput", "indexer_topk"),
)


def plan(tree: Tree, earlier: Path | None = None) -> dict[str, bytes]:
    """The files as they will be; nothing is written. Empty if the tree is patched.

    Raises:
        PatchError: the tree is not one that the patch fits exactly.
    """
    found = tree.inspect(earlier)
    if found.state.startswith("patched"):
        receipt = tree.receipt
        if receipt is not None and receipt.patch_sha256 != sha256(tree.manifest.patch):
            advice = "run `vime-vllm-patch revert`, then apply again"
            raise PatchError(
                f"{tree.root}: patched by vime-vllm-patch {receipt.tool} with another patch; {advice}"
            )
        return {}
    if not found.state.startswith("clean"):
        raise PatchError(_refusal(tree, found, earlier))
    files = {path: _patched(found, change) for path, change in tree.manifest.diffs.items()}
    for path, data in files.items():
        try:
            ast.parse(data)
        except SyntaxError as error:
            raise PatchError(f"{path}: would not compile after the patch ({error}); report this") from error
    return files


def _patched(found: Findings, change: diff.FileDiff) -> bytes:
    path = change.path
    return diff.apply(
        found.pristine.get(path, b""), found.present.get(path, b""), found.origins.get(path), change
    )


def _refusal(tree: Tree, found: Findings, earlier: Path | None) -> str:
    lines = [f"{tree.root}: vLLM {tree.version} is {found.state}; nothing was changed", *found.reasons]
    if found.state == "half-patched":
        advice = "run `vime-vllm-patch revert`" if tree.receipt else "reinstall vLLM"
    elif earlier is None and tree.receipt is None:
        advice = (
            "if another patch (vime's vllm.patch) is in there, pass it with --after FILE; else reinstall vLLM"
        )
    else:
        advice = "reinstall vLLM, or undo the other edits"
    return "\n  ".join([*lines, advice])


def apply(tree: Tree, earlier: Path | None = None) -> bool:
    """Patches the tree; False if it was patched already.

    Raises:
        PatchError: the tree is not one that the patch fits exactly; nothing was changed.
    """
    with _locked(tree):
        files = plan(tree, earlier)
        if not files:
            return False
        before = {path: tree.hash(path) for path in files}
        name = f"{earlier.name} sha256 {sha256(earlier.read_bytes())}" if earlier else None
        after = {path: sha256(data) for path, data in files.items()}
        receipt = Receipt(__version__, tree.version, sha256(tree.manifest.patch), name, before, after)
        _write_beside(tree, files)
        try:
            _keep_originals(tree, receipt)
            _rename(tree, files)
        except BaseException:
            _restore(tree, receipt)
            raise
        return True


def revert(tree: Tree) -> bool:
    """Puts back every byte that `apply` changed, also after one that was cut off; False if there is nothing to do.

    Raises:
        PatchError: a file was changed after the patch, or is patched by another tool; nothing was changed.
    """
    with _locked(tree):
        receipt = tree.receipt
        if receipt is None:
            found = tree.inspect()
            if found.state == "clean":
                return False
            if found.state == "patched":
                advice = f"undo it with `patch -R -p1` and {PATCH} of that tool"
                raise PatchError(f"{tree.root}: patched, but not by this command (no receipt); {advice}")
            raise PatchError(_refusal(tree, found, None))
        if tree.stale:
            # Only what the installer did not know is ours; the other files are of the vLLM that is here now.
            added = {path for path, digest in receipt.before.items() if not digest}
            ours = {path: "" for path in added if tree.hash(path) == receipt.after[path]}
            _restore(tree, replace(receipt, before=ours))
            return True
        found = tree.inspect()
        if found.state == "drifted":
            raise PatchError(_refusal(tree, found, None))
        for path, expected in receipt.before.items():
            kept = tree.root / ORIGINALS / path
            if expected and (not kept.is_file() or sha256(kept.read_bytes()) != expected):
                raise PatchError(f"{kept}: expected the original; reinstall vLLM")
        _restore(tree, receipt)
        return True


def verify(tree: Tree) -> list[str]:
    """What is wrong with a patched tree, one sentence each; empty if every file is as `apply` left it."""
    found = tree.inspect()
    if not found.state.startswith("patched"):
        return [f"{tree.root}: {found.state}, expected patched", *found.reasons]
    problems = []
    for path, owner, field in PROVIDES:
        for node in ast.parse((tree.root / path).read_bytes()).body:
            if isinstance(node, ast.ClassDef) and node.name == owner:
                names = {part.target.id for part in node.body if _is_field(part)}  # type: ignore[attr-defined]
                break
        else:
            names = set()
        if field not in names:
            problems.append(f"{path}: expected a field {field} in class {owner}, found none")
    return problems


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


@contextlib.contextmanager
def _locked(tree: Tree) -> Iterator[None]:
    # A lock on the folder itself leaves no file behind and ends with the process.
    folder = os.open(tree.root / "vllm", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + _BESIDE)


def _write_beside(tree: Tree, files: dict[str, bytes]) -> None:
    """All new files, under other names: a full or read-only disk shows here, with nothing changed."""
    try:
        for path, data in files.items():
            target = tree.root / path
            _beside(target).write_bytes(data)
            if target.exists():
                shutil.copymode(target, _beside(target))
    except BaseException:
        for path in files:
            _beside(tree.root / path).unlink(missing_ok=True)
        raise


def _keep_originals(tree: Tree, receipt: Receipt) -> None:
    for path, digest in receipt.before.items():
        if digest:
            kept = tree.root / ORIGINALS / path
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree.root / path, kept)
    stamp = tree.root / RECEIPT
    _beside(stamp).write_text(json.dumps(asdict(receipt), indent=1) + "\n")
    os.replace(_beside(stamp), stamp)


def _rename(tree: Tree, files: dict[str, bytes]) -> None:
    for path in files:
        os.replace(_beside(tree.root / path), tree.root / path)
        _forget_bytecode(tree.root / path)


def _restore(tree: Tree, receipt: Receipt) -> None:
    """Originals back, new files away, then the stamp, so that a cut here can be repeated."""
    for path, digest in receipt.before.items():
        target = tree.root / path
        _beside(target).unlink(missing_ok=True)
        if tree.hash(path) == digest:
            continue
        if digest:
            shutil.copy2(tree.root / ORIGINALS / path, _beside(target))
            os.replace(_beside(target), target)
        else:
            target.unlink()
        _forget_bytecode(target)
    (tree.root / RECEIPT).unlink(missing_ok=True)
    shutil.rmtree(tree.root / ORIGINALS, ignore_errors=True)
    with contextlib.suppress(OSError):  # another tool may keep its stamp in there
        (tree.root / STAMP).rmdir()


def _forget_bytecode(source: Path) -> None:
    # Bytecode may have been compiled with "unchecked" hashes, which Python never compares with the source.
    for compiled in source.parent.glob(f"__pycache__/{source.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
