# SPDX-License-Identifier: Apache-2.0
"""The shipped patches against the published wheels of vLLM, with GNU patch and git beside our own applier.

`nox -s patch_check` downloads the wheels and names their folder in VIME_VLLM_WHEELS; only the files that a patch
touches are unpacked.
"""

import ast
import difflib
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from vime_vllm_patch import apply, diff, manifest, wire
from vime_vllm_patch.errors import PatchError
from vime_vllm_patch.tree import Tree

pytestmark = pytest.mark.network

VERSIONS = ["0.32.0", "0.33.0"]
# vLLM's own floor.
OLDEST_PYTHON = (3, 10)


@pytest.fixture(scope="module", params=VERSIONS, ids=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wheel(version: str) -> zipfile.ZipFile:
    folder = os.environ.get("VIME_VLLM_WHEELS")
    if not folder:
        pytest.skip("VIME_VLLM_WHEELS is not set; run `nox -s patch_check`, which downloads the wheels")
    found = sorted(Path(folder).glob(f"vllm*-{version}*.whl"))
    assert len(found) == 1, f"expected one wheel of vLLM {version} in {folder}, found {found}"
    return zipfile.ZipFile(found[0])


@pytest.fixture(scope="module")
def pristine(version: str, wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(version)
    names = set(wheel.namelist())
    targets = manifest.load(version).patched
    # The folder of a new file exists in a wheel too.
    wanted = {
        "vllm/__init__.py",
        *targets,
        *(f"{path.rpartition('/')[0]}/__init__.py" for path in targets),
    } & names
    wanted |= {name for name in names if name.endswith((".dist-info/RECORD", ".dist-info/METADATA"))}
    wheel.extractall(root, sorted(wanted))
    return root


@pytest.fixture
def tree(pristine: Path, tmp_path: Path) -> Tree:
    shutil.copytree(pristine, tmp_path / "site")
    return Tree(tmp_path / "site")


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


def gnu_patch(root: Path, text: bytes, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["patch", "--batch", "-F0", "--no-backup-if-mismatch", *options]
    return subprocess.run(command, cwd=root, input=text.decode(), text=True, capture_output=True, check=False)


def stand_in(tree: Tree) -> bytes:
    """A patch in the manner of vime's vllm.patch to every file of ours: new lines at the top and between our hunks."""
    parts = []
    for path, change in tree.manifest.diffs.items():
        if change.creates:
            continue
        before = (tree.root / path).read_text().splitlines(keepends=True)
        after = list(before)
        covered = [line for hunk in change.hunks for line in (hunk.old_at, hunk.old_at + len(hunk.old))]
        # The blank line that is farthest from our hunks, so that it can stand at any depth of indentation.
        blanks = [at for at, line in enumerate(before) if line == "\n"]
        middle = max(blanks, key=lambda at: min(abs(at - line) for line in covered))
        after[middle : middle + 1] = ["\n", "# weight_version\n", "\n"]
        after[1:1] = ["# sampling_mask\n"] * 3
        parts += difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", n=3)
    return "".join(parts).encode()


def test_every_supported_version_is_checked_here() -> None:
    assert manifest.supported() == VERSIONS


def test_the_manifest_is_what_the_wheel_says(version: str, pristine: Path) -> None:
    built = manifest.build(pristine, version)
    known = manifest.load(version)
    assert (known.patched, manifest.sha256(known.patch)) == (built["patched"], built["patch_sha256"])
    tree = Tree(pristine)
    for path, accepted in known.pristine.items():
        assert (tree.record[path] in accepted) if accepted else (path not in tree.record)
    assert tree.inspect().state == "clean"


def test_the_patch_stays_within_the_package_and_its_context(version: str, wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for path, change in manifest.load(version).diffs.items():
        assert path.endswith(".py")
        assert change.creates == (path not in names)
        assert not change.deletes
        for hunk in change.hunks:
            tags = b"".join(tag for tag, _ in hunk.body)
            lead, trail = len(tags) - len(tags.lstrip(b" ")), len(tags) - len(tags.rstrip(b" "))
            assert max(lead, trail) <= 1, f"{path}: line {hunk.old_at + 1} has more than one line of context"
            added = b"".join(line for tag, line in hunk.body if tag == b"+")
            assert all(len(line) <= 88 for line in added.decode().splitlines()), path


@pytest.mark.parametrize("way", ["patch_p1", "patch_p2", "git"])
def test_other_appliers_put_every_hunk_where_it_says(tree: Tree, way: str) -> None:
    text = tree.manifest.patch
    if way == "git":
        done = subprocess.run(
            ["git", "apply", "-v", "-"],
            cwd=tree.root,
            input=text.decode(),
            text=True,
            capture_output=True,
            check=False,
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.root.parent)},
        )
    else:
        inside = tree.root / "vllm" if way == "patch_p2" else tree.root
        done = gnu_patch(inside, text, "-p2" if way == "patch_p2" else "-p1")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "offset" not in said
    assert "fuzz" not in said
    assert tree.inspect().state == "patched"
    again = gnu_patch(tree.root, text, "-p1", "--forward", "--dry-run")
    assert again.returncode != 0


def test_apply_and_revert(tree: Tree) -> None:
    before = snapshot(tree.root)
    assert apply.apply(tree)
    assert apply.verify(tree) == []
    assert {path: tree.hash(path) for path in tree.manifest.patched} == tree.manifest.patched
    assert not apply.apply(tree)
    assert apply.revert(tree)
    assert snapshot(tree.root) == before


def test_on_top_of_the_stand_in(tree: Tree, tmp_path: Path) -> None:
    assert manifest.order()[-1] == manifest.PATCH
    earlier = tmp_path / manifest.order()[0]
    earlier.write_bytes(stand_in(tree))
    assert gnu_patch(tree.root, earlier.read_bytes(), "-p1").returncode == 0
    before = snapshot(tree.root)
    by_patch = tmp_path / "by_patch"
    shutil.copytree(tree.root, by_patch)
    with pytest.raises(PatchError, match="drifted"):
        apply.apply(tree)
    assert snapshot(tree.root) == before
    assert apply.apply(tree, earlier)
    assert tree.inspect().state == "patched+other"
    assert apply.verify(tree) == []
    done = gnu_patch(by_patch, tree.manifest.patch, "-p1")
    assert done.returncode == 0, done.stdout
    for path in tree.manifest.patched:
        assert (tree.root / path).read_bytes() == (by_patch / path).read_bytes(), path
        ast.parse((tree.root / path).read_bytes())
    assert apply.revert(tree)
    assert snapshot(tree.root) == before


def test_a_flipped_bit_in_any_file_is_refused(tree: Tree) -> None:
    for path, accepted in tree.manifest.pristine.items():
        if not accepted:
            continue
        file = tree.root / path
        data = file.read_bytes()
        for at in (0, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(PatchError, match=f"{path}: sha256"):
                apply.apply(tree)
        file.write_bytes(data)
    assert tree.inspect().state == "clean"


def test_the_patched_files_are_good_python_with_the_wires_names(tree: Tree) -> None:
    apply.apply(tree)
    for path in tree.manifest.patched:
        source = (tree.root / path).read_text()
        ast.parse(source, feature_version=OLDEST_PYTHON)
        compile(source, path, "exec", dont_inherit=True)
    added = b"".join(
        line
        for change in diff.parse(tree.manifest.patch, manifest.PATCH).values()
        for hunk in change.hunks
        for tag, line in hunk.body
        if tag == b"+"
    ).decode()
    for name in (wire.FIELD, wire.LAYER_IDS_FIELD, wire.PROMPT_START_OPTION, wire.OPT_OUT_OPTION):
        assert f"{name}:" in added
