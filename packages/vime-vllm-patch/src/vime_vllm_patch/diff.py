# SPDX-License-Identifier: Apache-2.0
"""Unified diffs, applied where they say or not at all: no fuzz, and no search for our own hunks.

`patch` looks for a hunk near its place and takes the first match, which with one line of context can be a wrong one.
Here a hunk of ours goes where the line map says: the identity on the pristine file, or, when another patch came first,
the map that undoing that patch gives. Undoing does search, as `patch` did when it applied it; the caller compares the
result's hash with the pristine file's, so a wrong match cannot pass.
Left out: renames, mode changes and binary hunks; a file that has them is refused. Format: POSIX diff -u, git's headers.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from vime_vllm_patch.errors import PatchError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_REFUSED = (b"rename from ", b"copy from ", b"GIT binary patch", b"Binary files ", b"old mode ")
_NO_NEWLINE = b"\\ No newline"
ABSENT = -1


@dataclass(frozen=True)
class Hunk:
    """One hunk.

    Attributes:
        old_at: first line it covers before, counted from 0.
        new_at: first line it covers after.
        body: (b" ", b"-" or b"+", the line with its line end).
    """

    old_at: int
    new_at: int
    body: tuple[tuple[bytes, bytes], ...]

    @property
    def old(self) -> list[bytes]:
        """The covered lines before."""
        return [line for tag, line in self.body if tag != b"+"]

    @property
    def new(self) -> list[bytes]:
        """The covered lines after."""
        return [line for tag, line in self.body if tag != b"-"]


@dataclass(frozen=True)
class FileDiff:
    """The hunks of one file; `creates` and `deletes` mark diffs from and to /dev/null."""

    path: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    deletes: bool = False


def parse(text: bytes, name: str) -> dict[str, FileDiff]:
    """The diffs of a patch file by path, in the file's order; paths are relative to the folder that holds `vllm/`.

    Raises:
        PatchError: the file is not a plain unified diff with a/ and b/ prefixes.
    """
    found: dict[str, FileDiff] = {}
    lines = _lines(text)
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(_REFUSED):
            raise PatchError(
                f"{name}: line {at + 1}: expected a plain text diff, got {line[:40]!r}; make it without"
            )
        if not (line.startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ ")):
            at += 1
            continue
        before, after = (_path(lines[i], name, i) for i in (at, at + 1))
        hunks = []
        at += 2
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _hunk(lines, at, name)
            hunks.append(hunk)
        path = after or before
        if path is None or (before and after and before != after) or not hunks or path in found:
            raise PatchError(
                f"{name}: line {at}: expected one block of hunks for each file, got {before} -> {after}"
            )
        found[path] = FileDiff(path, tuple(hunks), creates=before is None, deletes=after is None)
    if not found:
        raise PatchError(f"{name}: expected a unified diff, found no file in it")
    return found


def _lines(text: bytes) -> list[bytes]:
    # Not splitlines: diff ends a line at a line feed only.
    return re.findall(rb"[^\n]*\n|[^\n]+", text)


def _path(line: bytes, name: str, at: int) -> str | None:
    path = line[4:].split(b"\t")[0].strip().decode(errors="backslashreplace")
    if path == "/dev/null":
        return None
    prefix, _, rest = path.partition("/")
    if prefix not in ("a", "b") or not rest.startswith("vllm/") or ".." in rest.split("/"):
        raise PatchError(f"{name}: line {at + 1}: expected a path a/vllm/… or b/vllm/…, got {path!r}")
    return rest


def _hunk(lines: Sequence[bytes], at: int, name: str) -> tuple[Hunk, int]:
    head = _HUNK.match(lines[at])
    if not head:
        raise PatchError(f"{name}: line {at + 1}: not a hunk header: {lines[at][:60]!r}")
    old_at, old_n, new_at, new_n = (int(group) if group else 1 for group in head.groups())
    start, left_old, left_new = at, old_n, new_n
    body: list[tuple[bytes, bytes]] = []
    at += 1
    while left_old or left_new:
        if at == len(lines) or (tag := lines[at][:1]) not in (b" ", b"-", b"+"):
            raise PatchError(
                f"{name}: line {at + 1}: the hunk of line {start + 1} ends early; is the file cut off?"
            )
        body.append((tag, lines[at][1:]))
        left_old -= tag != b"+"
        left_new -= tag != b"-"
        at += 1
        if at < len(lines) and lines[at].startswith(_NO_NEWLINE):
            body[-1] = (tag, body[-1][1].removesuffix(b"\n"))
            at += 1
    # A side without lines names the line before it; otherwise lines count from 1.
    return Hunk(old_at - (old_n > 0), new_at - (new_n > 0), tuple(body)), at


def apply(pristine: bytes, present: bytes, origin: Sequence[int] | None, diff: FileDiff) -> bytes:
    """`present` with our hunks in it.

    Args:
        pristine: the file that the diff was made on.
        present: the file now; `pristine`, perhaps with another patch in it.
        origin: for each line of `pristine` its line in `present`, or ABSENT; see `undo`. None: they are the same file.
        diff: our hunks; for a file that they create, both files are empty.

    Raises:
        PatchError: a hunk does not match, or the other patch changed the lines that it covers.
    """
    if diff.creates:
        return b"".join(diff.hunks[0].new)
    before, lines = _lines(pristine), _lines(present)
    origin = range(len(before)) if origin is None else origin
    out: list[bytes] = []
    done = 0
    for number, hunk in enumerate(diff.hunks, 1):
        where = f"{diff.path}: hunk {number} at line {hunk.old_at + 1}"
        end = hunk.old_at + len(hunk.old)
        if before[hunk.old_at : end] != hunk.old:
            raise PatchError(f"{where}: the lines it replaces are not there; the patch is for another vLLM")
        places = list(origin[hunk.old_at : end])
        if not places or places[0] == ABSENT or places != list(range(places[0], places[0] + len(places))):
            raise PatchError(f"{where}: the earlier patch changed the same lines; zero fuzz allows no guess")
        out += lines[done : places[0]]
        out += hunk.new
        done = places[-1] + 1
    return b"".join(out + lines[done:])


def undo(present: bytes, diff: FileDiff) -> tuple[bytes, list[int]]:
    """The file before `diff`, and for each of its lines the line in `present` that it is (ABSENT: removed by `diff`).

    Raises:
        PatchError: a hunk of `diff` is not in the file.
    """
    lines = _lines(present)
    before: list[bytes] = []
    origin: list[int] = []
    done = offset = 0
    for number, hunk in enumerate(diff.hunks, 1):
        at = _nearest(lines, hunk.new, hunk.new_at + offset, done)
        if at is None:
            raise PatchError(f"{diff.path}: hunk {number} of the earlier patch is not in the file")
        offset = at - hunk.new_at
        before += lines[done:at]
        origin += range(done, at)
        for tag, line in hunk.body:
            if tag != b"+":
                before.append(line)
                origin.append(at if tag == b" " else ABSENT)
            at += tag != b"-"
        done = at
    return b"".join(before + lines[done:]), [*origin, *range(done, len(lines))]


def _nearest(lines: Sequence[bytes], block: Sequence[bytes], wanted: int, first: int) -> int | None:
    last = len(lines) - len(block)

    def outward() -> Iterator[int]:
        for distance in count():
            yield wanted + distance
            yield wanted - distance
            if distance > len(lines) + abs(wanted):
                return

    return next(
        (at for at in outward() if first <= at <= last and list(lines[at : at + len(block)]) == block), None
    )
