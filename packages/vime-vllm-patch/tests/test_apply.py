# SPDX-License-Identifier: Apache-2.0
"""Patching a synthetic vLLM in every state a real one can be in: the result, or a refusal that changed nothing."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from vime_vllm_patch import apply, manifest
from vime_vllm_patch.errors import PatchError, Unsupported
from vime_vllm_patch.tree import RECEIPT, Tree, find

NEW_FILE = "vllm/model_executor/layers/indexer_topk_capturer.py"
TARGET = "vllm/outputs.py"


def test_apply_then_revert_gives_back_every_byte(tree: Tree, fake: SimpleNamespace) -> None:
    (tree.root / TARGET).chmod(0o640)
    before = fake.snapshot(tree.root)
    assert apply.apply(tree)
    now = fake.snapshot(tree.root)
    for path, text in fake.patched.items():
        assert now[path] == text.encode()
    assert (tree.root / TARGET).stat().st_mode & 0o777 == 0o640
    assert tree.inspect().state == "patched"
    assert apply.verify(tree) == []
    assert not apply.apply(tree)
    assert fake.snapshot(tree.root) == now
    assert apply.revert(tree)
    assert fake.snapshot(tree.root) == before
    assert (tree.root / TARGET).stat().st_mode & 0o777 == 0o640
    assert not apply.revert(tree)


def test_on_top_of_the_hosts_patch(tree: Tree, fake: SimpleNamespace, earlier_patch: Path) -> None:
    fake.write(tree.root, fake.earlier)
    before = fake.snapshot(tree.root)
    with pytest.raises(PatchError, match=r"drifted; nothing was changed(.|\n)*pass it with --after FILE"):
        apply.apply(tree)
    assert tree.inspect(earlier_patch).state == "clean+other"
    apply.apply(tree, earlier_patch)
    assert tree.inspect().state == "patched+other"
    assert apply.verify(tree) == []
    # GNU patch, told to allow no fuzz, does the same to the same files.
    by_patch = tree.root.parent / "by_patch"
    fake.write(by_patch, fake.earlier)
    text = manifest.read_patch("0.32.0")
    subprocess.run(["patch", "-p1", "-F0", "-s"], cwd=by_patch, input=text, check=True)
    for path in fake.patched:
        assert (tree.root / path).read_bytes() == (by_patch / path).read_bytes()
    apply.revert(tree)
    assert fake.snapshot(tree.root) == before


def test_the_hosts_way_of_patching_is_recognised_and_undone(tree: Tree, fake: SimpleNamespace) -> None:
    text = manifest.read_patch("0.32.0")
    subprocess.run(["patch", "-p2", "-F0", "-s"], cwd=tree.root / "vllm", input=text, check=True)
    assert tree.inspect().state == "patched"
    assert not apply.apply(tree)
    assert apply.verify(tree) == []
    with pytest.raises(PatchError, match="no receipt"):
        apply.revert(tree)


def flip(tree: Tree) -> None:
    path = tree.root / TARGET
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(bytes(data))


def windows_lines(tree: Tree) -> None:
    path = tree.root / TARGET
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def by_hand(tree: Tree) -> None:
    (tree.root / NEW_FILE).write_text("# not ours\n")


def half(tree: Tree) -> None:
    text = manifest.read_patch("0.32.0")
    at = text.index(b"--- a/vllm/engine")
    subprocess.run(["patch", "-p1", "-F0", "-s"], cwd=tree.root, input=text[:at], check=True)


def other_build(tree: Tree) -> None:
    record = next(tree.root.glob("*.dist-info/RECORD"))
    line = next(line for line in record.read_text().splitlines() if line.startswith(TARGET))
    record.write_text(record.read_text().replace(line, line.replace("sha256=", "sha256=A")[:-1]))


BROKEN: dict[str, tuple[Callable[[Tree], None], str]] = {
    "flipped_bit": (flip, r"drifted(.|\n)*vllm/outputs.py: sha256 "),
    "missing_file": (lambda tree: (tree.root / TARGET).unlink(), "expected a file, found none"),
    "crlf": (windows_lines, r"drifted(.|\n)*vllm/outputs.py"),
    "new_file_there": (by_hand, "expected no such file"),
    "half_patched": (half, r"half-patched(.|\n)*reinstall vLLM"),
    "other_build": (other_build, "this is another build"),
}


@pytest.mark.parametrize("breaks, message", BROKEN.values(), ids=BROKEN.keys())
def test_a_tree_that_does_not_fit_is_refused_untouched(
    tree: Tree, fake: SimpleNamespace, breaks: Callable[[Tree], None], message: str
) -> None:
    breaks(tree)
    before = fake.snapshot(tree.root)
    for verb in (apply.plan, apply.apply):
        with pytest.raises(PatchError, match=message) as caught:
            verb(Tree(tree.root))
        assert caught.value.status == 2
    assert fake.snapshot(tree.root) == before
    assert apply.verify(tree)


def test_an_earlier_patch_that_is_not_in_the_tree_is_refused(tree: Tree, earlier_patch: Path) -> None:
    with pytest.raises(PatchError, match="hunk 1 of the earlier patch is not in the file"):
        apply.apply(tree, earlier_patch)


def test_an_earlier_patch_explains_its_own_changes_only(
    tree: Tree, fake: SimpleNamespace, earlier_patch: Path
) -> None:
    fake.write(tree.root, fake.earlier)
    path = tree.root / TARGET
    path.write_text(path.read_text() + "\n# one more edit\n")
    with pytest.raises(PatchError, match="without the earlier patch sha256"):
        apply.apply(tree, earlier_patch)


@pytest.mark.parametrize("stop_at", range(5), ids=str)
def test_cut_off_between_renames_it_can_be_put_back(
    tree: Tree, fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    before = fake.snapshot(tree.root)
    renamed = []
    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if "vllm.vime" not in str(target) and target.name != RECEIPT.name:
            if len(renamed) == stop_at:
                raise KeyboardInterrupt
            renamed.append(target)
        replace(source, target)

    monkeypatch.setattr(apply.os, "replace", killed)
    monkeypatch.setattr(apply, "_restore", lambda tree, receipt: None)  # as if the process were gone
    with pytest.raises(KeyboardInterrupt):
        apply.apply(tree)
    monkeypatch.undo()
    found = Tree(tree.root)
    assert found.receipt is not None
    monkeypatch.setattr(manifest, "_DATA", tree.root.parent / "data")
    assert found.inspect().state == "half-patched"
    with pytest.raises(PatchError, match="run `vime-vllm-patch revert`"):
        apply.apply(found)
    assert apply.revert(found)
    assert fake.snapshot(tree.root) == before


def test_an_error_between_renames_is_rolled_back(
    tree: Tree, fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fake.snapshot(tree.root)
    forget = apply._forget_bytecode

    def full(source: Path) -> None:
        if source.name == "outputs.py" and "indexer_topk" in source.read_text():
            raise OSError("no space left")
        forget(source)

    monkeypatch.setattr(apply, "_forget_bytecode", full)
    with pytest.raises(OSError, match="no space"):
        apply.apply(tree)
    assert fake.snapshot(tree.root) == before


def test_no_new_file_is_left_when_one_cannot_be_written(
    tree: Tree, fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fake.snapshot(tree.root)

    def refused(source: Path, target: Path) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(shutil, "copymode", refused)
    with pytest.raises(PermissionError):
        apply.apply(tree)
    assert fake.snapshot(tree.root) == before


def test_revert_refuses_after_a_foreign_edit(tree: Tree, fake: SimpleNamespace) -> None:
    apply.apply(tree)
    flip(tree)
    before = fake.snapshot(tree.root)
    with pytest.raises(PatchError, match=r"vllm/outputs.py: changed after it was patched"):
        apply.revert(tree)
    assert fake.snapshot(tree.root) == before
    assert apply.verify(tree)[1:] == ["vllm/outputs.py: changed after it was patched"]


def test_revert_refuses_when_an_original_is_damaged(tree: Tree) -> None:
    apply.apply(tree)
    (tree.root / "vllm/.vime-patch/originals" / TARGET).write_text("x")
    with pytest.raises(PatchError, match="expected the original"):
        apply.revert(tree)


def test_another_patch_than_the_applied_one_needs_a_revert_first(
    tree: Tree, data: Path, fake: SimpleNamespace
) -> None:
    apply.apply(tree)
    path = data / "patches/0.32" / manifest.PATCH
    path.write_bytes(b"# newer\n" + path.read_bytes())
    stored = json.loads((data / "manifests/0.32.0.json").read_text())
    stored["patch_sha256"] = manifest.sha256(path.read_bytes())
    (data / "manifests/0.32.0.json").write_text(json.dumps(stored))
    with pytest.raises(PatchError, match="with another patch; run `vime-vllm-patch revert`"):
        apply.apply(Tree(tree.root))
    assert apply.revert(Tree(tree.root))


def test_two_at_once_patch_once(tree: Tree, fake: SimpleNamespace) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(lambda _: apply.apply(Tree(tree.root)), range(4))) == [
            False,
            False,
            False,
            True,
        ]
    assert Tree(tree.root).inspect().state == "patched"


def test_stale_bytecode_goes_away(tree: Tree) -> None:
    script = f"import py_compile; py_compile.compile({TARGET!r}, invalidation_mode=py_compile.PycInvalidationMode.{{}})"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPYCACHEPREFIX"}
    run = [sys.executable, "-c", script.format("UNCHECKED_HASH")]
    subprocess.run(run, cwd=tree.root, check=True, env=environment)
    ask = [
        sys.executable,
        "-c",
        "import vllm.outputs as o; print(hasattr(o.CompletionOutput, 'indexer_topk'))",
    ]

    def answer() -> str:
        done = subprocess.run(ask, cwd=tree.root, check=True, env=environment, capture_output=True, text=True)
        return done.stdout.strip()

    assert answer() == "False"
    apply.apply(tree)
    assert answer() == "True"
    subprocess.run(run, cwd=tree.root, check=True, env=environment)
    apply.revert(tree)
    assert answer() == "False"


def test_a_cache_that_the_files_are_linked_to_stays_as_it_is(tree: Tree, fake: SimpleNamespace) -> None:
    cache = tree.root.parent / "cache"
    for path in fake.pristine:
        (cache / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(tree.root / path, cache / path)
    before = fake.snapshot(cache)
    apply.apply(tree)
    assert fake.snapshot(cache) == before


@pytest.mark.parametrize("place", ["site", "site/vllm"], ids=["parent", "package"])
def test_the_tree_is_found_from_either_folder(tree: Tree, place: str) -> None:
    assert find(tree.root.parent / place).root == tree.root


def test_a_checkout_is_known_by_its_files(tmp_path: Path, data: Path, fake: SimpleNamespace) -> None:
    checkout = tmp_path / "vllm"
    fake.write(checkout, fake.pristine)
    before = fake.snapshot(checkout)
    tree = find(checkout)
    assert (tree.root, tree.version) == (checkout, "0.32.0")
    assert apply.apply(tree)
    assert find(checkout).version == "0.32.0"
    assert apply.revert(find(checkout))
    assert fake.snapshot(checkout) == before
    flip(tree)
    with pytest.raises(PatchError, match="drifted"):
        apply.apply(find(checkout))


def test_two_distributions_that_own_vllm_are_refused(tree: Tree, fake: SimpleNamespace) -> None:
    fake.write_wheel(tree.root, fake.pristine, "vllm", "0.32.0")
    with pytest.raises(PatchError, match="expected one distribution"):
        apply.apply(Tree(tree.root))


def test_other_versions_are_unsupported(tmp_path: Path, data: Path, fake: SimpleNamespace) -> None:
    fake.write_wheel(tmp_path / "old", fake.pristine, "vllm", "0.31.2")
    with pytest.raises(Unsupported, match=r"vLLM 0\.31\.2: there is no patch.*supported are 0\.32\.0"):
        apply.apply(Tree(tmp_path / "old"))
    fake.write(tmp_path / "unknown", {"vllm/__init__.py": "", "vllm/config/aux_output.py": "x = 1\n"})
    with pytest.raises(Unsupported, match="no version of vLLM was found"):
        apply.apply(find(tmp_path / "unknown"))


def test_a_manifest_for_another_patch_file_is_refused(tree: Tree, data: Path) -> None:
    path = data / "patches/0.32" / manifest.PATCH
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(PatchError, match="is not the file its manifest names"):
        apply.apply(tree)


def test_a_patch_that_breaks_python_is_not_applied(tree: Tree, data: Path, fake: SimpleNamespace) -> None:
    path = data / "patches/0.32" / manifest.PATCH
    path.write_bytes(path.read_bytes().replace(b"+    indexer_topk: int = 0", b"+    indexer_topk: int = ("))
    before = fake.snapshot(tree.root)
    stored = manifest.build(tree.root, "0.32.0")
    (data / "manifests/0.32.0.json").write_text(json.dumps(stored))
    with pytest.raises(PatchError, match="would not compile"):
        apply.apply(tree)
    assert fake.snapshot(tree.root) == before


def test_verify_names_a_missing_field(tree: Tree, data: Path) -> None:
    path = data / "patches/0.32" / manifest.PATCH
    path.write_bytes(path.read_bytes().replace(b"+    return_indexer_topk", b"+    return_indexer_top"))
    (data / "manifests/0.32.0.json").write_text(json.dumps(manifest.build(tree.root, "0.32.0")))
    apply.apply(tree)
    assert apply.verify(tree) == [
        "vllm/sampling_params.py: expected a field return_indexer_topk in class SamplingParams, found none"
    ]
