# SPDX-License-Identifier: Apache-2.0
"""Each fault that check_workspace looks for, planted in a two-member tree."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from check_workspace import problems


def write_member(root: Path, name: str, version: str, dependencies: str = "") -> Path:
    path = root / "packages" / name
    module = path / "src" / name.replace("-", "_")
    module.mkdir(parents=True)
    (path / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = [{dependencies}]\n'
    )
    (path / "CHANGELOG.md").write_text(f"# Changelog\n\n## Unreleased\n\n## {version}\n")
    (module / "__init__.py").write_text(
        f'# SPDX-License-Identifier: Apache-2.0\n"""Doc."""\n\n__version__ = "{version}"\n'
    )
    for file in (module / "py.typed", path / "README.md", path / "LICENSE", path / "NOTICE"):
        file.write_text("x\n")
    for name in ("LICENSE", "NOTICE"):
        (root / name).write_text("x\n")
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.uv.sources]\nvime-a = { workspace = true }\nvime-b = { workspace = true }\n"
    )
    write_member(tmp_path, "vime-a", "0.2.1")
    write_member(tmp_path, "vime-b", "0.1.0", '"vime-a>=0.2,<0.3"')
    return tmp_path


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_clean_tree_has_no_problem(tree: Path) -> None:
    assert problems(tree) == []


def test_range_that_excludes_the_sibling(tree: Path) -> None:
    rewrite(tree / "packages/vime-b/pyproject.toml", "<0.3", "<0.2.1")
    assert "excludes vime-a 0.2.1" in problems(tree)[0]


@pytest.mark.parametrize("spec", [">=0.2", "<0.3", ""], ids=["no-upper", "no-lower", "no-range"])
def test_one_sided_range(tree: Path, spec: str) -> None:
    rewrite(tree / "packages/vime-b/pyproject.toml", ">=0.2,<0.3", spec)
    assert "needs a lower and an upper bound" in problems(tree)[0]


def test_unknown_sibling_and_missing_source(tree: Path) -> None:
    rewrite(tree / "packages/vime-b/pyproject.toml", "vime-a>=0.2,<0.3", "vime-c>=0.1,<0.2")
    assert "no member" in problems(tree)[0]
    rewrite(tree / "packages/vime-b/pyproject.toml", "vime-c>=0.1,<0.2", "vime-a>=0.2,<0.3")
    rewrite(tree / "pyproject.toml", "vime-a = { workspace = true }\n", "")
    assert "tool.uv.sources" in problems(tree)[0]


def test_circle(tree: Path) -> None:
    rewrite(
        tree / "packages/vime-a/pyproject.toml", "dependencies = []", 'dependencies = ["vime-b>=0.1,<0.2"]'
    )
    assert "circle among the members: vime-a -> vime-b -> vime-a" in problems(tree)


def test_changelog_and_module_version(tree: Path) -> None:
    rewrite(tree / "packages/vime-a/CHANGELOG.md", "## 0.2.1", "## 0.2.0")
    rewrite(tree / "packages/vime-a/src/vime_a/__init__.py", "0.2.1", "0.2.0")
    found = problems(tree)
    assert any("newest CHANGELOG.md heading 0.2.0" in line for line in found)
    assert any("does not state __version__" in line for line in found)


def test_missing_header_and_long_file(tree: Path) -> None:
    (tree / "long.py").write_text("x = 1\n" * 400)
    found = problems(tree)
    assert any("the first line must be" in line for line in found)
    assert any("400 lines, the budget is 350" in line for line in found)


def test_source_changed_since_its_tag(tree: Path) -> None:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "add", "-A"], cwd=tree, check=True)
    subprocess.run([*git, "commit", "-qm", "x"], cwd=tree, check=True)
    subprocess.run([*git, "tag", "vime-a-v0.2.1"], cwd=tree, check=True)
    assert problems(tree) == []
    module = tree / "packages/vime-a/src/vime_a/__init__.py"
    module.write_text(module.read_text() + "x = 1\n")
    assert "bump the version" in problems(tree)[0]


def test_missing_wheel_files(tree: Path) -> None:
    (tree / "packages/vime-b/src/vime_b/py.typed").unlink()
    (tree / "packages/vime-a/NOTICE").write_text("other\n")
    assert problems(tree) == [
        "vime-a: NOTICE must be a copy of the workspace's NOTICE",
        "vime-b: src/vime_b/py.typed is missing",
    ]
