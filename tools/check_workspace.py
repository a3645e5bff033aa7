# SPDX-License-Identifier: Apache-2.0
"""Checks that uv does not make: whether the five packages fit together and each can be released.

Inside a workspace uv takes siblings from the tree and never compares their versions with the ranges that the
published metadata states, so a tree can pass every test while no user can install it. `problems()` returns one
sentence for each fault; the command prints them and exits 1 if there is any.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

PREFIX = "vime-"
MAX_LINES = 350
SPDX = "SPDX-License-Identifier: Apache-2.0"


@dataclass
class Member:
    """One package of the workspace, as its pyproject.toml states it."""

    path: Path
    name: str
    version: Version
    requires: list[Requirement] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    @property
    def siblings(self) -> list[Requirement]:
        """Requirements on other members; a package's own extras do not count."""
        return [r for r in self.requires if r.name.startswith(PREFIX) and r.name != self.name]


def read_member(path: Path) -> Member:
    """The member in the folder `path`; unreadable requirement lines are kept in `bad`."""
    project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
    member = Member(path, project["name"], Version(project["version"]))
    lines = list(project.get("dependencies", []))
    for extra in project.get("optional-dependencies", {}).values():
        lines += extra
    for line in lines:
        try:
            member.requires.append(Requirement(line))
        except InvalidRequirement as error:
            member.bad.append(f"{member.name}: cannot read the requirement {line!r}: {error}")
    return member


def sibling_problems(members: dict[str, Member], sources: dict[str, object]) -> Iterator[str]:
    """Ranges without both ends, ranges that exclude the sibling's version, unknown names, missing sources."""
    for member in members.values():
        yield from member.bad
        for requirement in member.siblings:
            sibling = members.get(requirement.name)
            if sibling is None:
                yield f"{member.name}: requires {requirement.name}, which is no member of this workspace"
                continue
            if requirement.name not in sources:
                yield f"{requirement.name}: add it to [tool.uv.sources] of the root pyproject.toml"
            operators = {spec.operator for spec in requirement.specifier}
            if not operators & {">=", "~=", "=="} or not operators & {"<", "<=", "~=", "=="}:
                yield f"{member.name}: '{requirement}' needs a lower and an upper bound, e.g. >=0.1,<0.2"
            elif not requirement.specifier.contains(sibling.version, prereleases=True):
                yield (
                    f"{member.name}: '{requirement}' excludes {sibling.name} {sibling.version} in this tree; "
                    "edit the range in the same commit as the version"
                )


def cycle_problems(members: dict[str, Member]) -> Iterator[str]:
    """Import arrows must not form a circle."""
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield "circle among the members: " + " -> ".join((*path[path.index(name) :], name))
            return
        if name in done or name not in members:
            return
        for requirement in members[name].siblings:
            yield from walk(requirement.name, (*path, name))
        done.add(name)

    for name in members:
        yield from walk(name, ())


def newest_release(changelog: str) -> str | None:
    """The first version heading after `## Unreleased`."""
    headings = re.findall(r"^## (\S+)", changelog, flags=re.MULTILINE)
    return next((heading for heading in headings if heading != "Unreleased"), None)


def release_problems(member: Member) -> Iterator[str]:
    """Changelog, module version and the files that every wheel carries."""
    changelog = member.path / "CHANGELOG.md"
    text = changelog.read_text() if changelog.exists() else ""
    if not re.search(r"^## Unreleased$", text, flags=re.MULTILINE):
        yield f"{member.name}: CHANGELOG.md has no '## Unreleased' heading"
    if newest_release(text) != str(member.version):
        yield f"{member.name}: version {member.version}, newest CHANGELOG.md heading {newest_release(text)}"
    module = member.path / "src" / member.name.replace("-", "_")
    init = (module / "__init__.py").read_text() if (module / "__init__.py").exists() else ""
    if f'__version__ = "{member.version}"' not in init:
        yield f'{member.name}: {module.name}/__init__.py does not state __version__ = "{member.version}"'
    for needed in (module / "py.typed", member.path / "README.md"):
        if not needed.exists():
            yield f"{member.name}: {needed.relative_to(member.path)} is missing"
    # Copies, not links: a source archive may not contain links that leave it.
    for name in ("LICENSE", "NOTICE"):
        own, shared = member.path / name, member.path.parent.parent / name
        if own.is_symlink() or not own.exists() or own.read_bytes() != shared.read_bytes():
            yield f"{member.name}: {name} must be a copy of the workspace's {name}"


def tag_problems(root: Path, member: Member) -> Iterator[str]:
    """Sources that changed since the tag of the present version need a new version."""
    tag = f"{member.name}-v{member.version}"

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *args], cwd=root, text=True, capture_output=True, check=False)

    if not git("tag", "--list", tag).stdout.strip():
        return
    changed = git("diff", "--name-only", tag, "--", str(member.path / "src")).stdout.split()
    if changed:
        yield f"{member.name}: {len(changed)} source files changed since tag {tag}; bump the version"


def file_problems(root: Path) -> Iterator[str]:
    """Licence headers and the length budget of Python files."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=root,
        text=True,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.split():
        path = root / name
        if not path.exists():
            continue
        lines = path.read_text().splitlines()
        if lines and SPDX not in "\n".join(lines[:3]):
            yield f"{name}: the first line must be '# {SPDX}'"
        if len(lines) > MAX_LINES and "Longer than" not in "\n".join(lines[:12]):
            yield (
                f"{name}: {len(lines)} lines, the budget is {MAX_LINES}; "
                "split it, or say 'Longer than …, because …' at its top"
            )


def problems(root: Path) -> list[str]:
    """Every fault of the workspace at `root`, one sentence each."""
    config = tomllib.loads((root / "pyproject.toml").read_text())
    sources = config["tool"]["uv"].get("sources", {})
    members = {m.name: m for m in map(read_member, sorted((root / "packages").iterdir()))}
    found = [*sibling_problems(members, sources), *cycle_problems(members), *file_problems(root)]
    for member in members.values():
        found += [*release_problems(member), *tag_problems(root, member)]
    return found


def main() -> int:
    """Prints the faults of the workspace; 1 if there is any."""
    root = Path(__file__).resolve().parent.parent
    found = problems(root)
    for sentence in found:
        print(sentence)
    print(f"check_workspace: {len(found)} problem(s)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
