# SPDX-License-Identifier: Apache-2.0
"""Our applier against difflib (which makes the diffs) and git's three-way merge (which combines two of them)."""

import difflib
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vime_vllm_patch.diff import FileDiff, apply, parse, undo
from vime_vllm_patch.errors import PatchError

# Few distinct lines: the same block then stands in several places, which is what searching appliers get wrong.
LINES = st.lists(st.sampled_from(["a\n", "b\n", "    )\n", "\n"]), min_size=1, max_size=24)
EDITS = st.lists(
    st.tuples(st.integers(0, 24), st.integers(0, 2), st.lists(st.sampled_from(["x\n", "b\n"]), max_size=2)),
    max_size=4,
)


def edited(lines: list[str], edits: list[tuple[int, int, list[str]]]) -> list[str]:
    lines = list(lines)
    for at, removed, added in edits:
        lines[at : at + removed] = added
    return lines


def made(before: list[str], after: list[str], context: int) -> FileDiff | None:
    text = "".join(difflib.unified_diff(before, after, "a/vllm/x.py", "b/vllm/x.py", n=context)).encode()
    return parse(text, "x.patch")["vllm/x.py"] if text else None


def joined(lines: list[str]) -> bytes:
    return "".join(lines).encode()


@given(LINES, EDITS, st.integers(1, 3))
def test_apply_and_undo_are_what_difflib_described(
    before: list[str], edits: list[tuple[int, int, list[str]]], context: int
) -> None:
    after = edited(before, edits)
    change = made(before, after, context)
    if change is None or not all(hunk.old for hunk in change.hunks):
        return
    assert apply(joined(before), joined(before), None, change) == joined(after)
    again, origin = undo(joined(after), change)
    assert again == joined(before)
    assert all(at == -1 or after[at] == line for at, line in zip(origin, before, strict=True))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(LINES, EDITS, EDITS)
def test_on_top_of_another_patch_the_result_is_gits_merge(
    tmp_path: Path,
    base: list[str],
    ours: list[tuple[int, int, list[str]]],
    theirs: list[tuple[int, int, list[str]]],
) -> None:
    with_ours, with_theirs = edited(base, ours), edited(base, theirs)
    our_diff, their_diff = made(base, with_ours, 1), made(base, with_theirs, 3)
    if not our_diff or not their_diff or not all(hunk.old for hunk in our_diff.hunks):
        return
    again, origin = undo(joined(with_theirs), their_diff)
    assert again == joined(base)
    try:
        found = apply(joined(base), joined(with_theirs), origin, our_diff)
    except PatchError:
        return
    for name, lines in (("theirs", with_theirs), ("base", base), ("ours", with_ours)):
        (tmp_path / name).write_bytes(joined(lines))
    merge = subprocess.run(
        ["git", "merge-file", "-p", "--diff-algorithm=myers", "theirs", "base", "ours"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    # Git also calls edits of neighbouring lines a conflict; where it merges, the result is the same.
    if merge.returncode == 0:
        assert found == merge.stdout


BASE = "one\ntwo\nthree\nfour\n"
REPEATED = ["f(\n", "    1,\n", ")\n"] * 4


def test_a_hunk_never_slides_to_another_place_with_the_same_lines() -> None:
    change = made(REPEATED, [*REPEATED[:7], "    2,\n", *REPEATED[7:]], 1)
    assert change is not None
    shifted = joined(REPEATED[3:])
    with pytest.raises(PatchError, match="hunk 1 at line 7: the lines it replaces are not there"):
        apply(shifted[: shifted.index(b")")], shifted, None, change)
    with_two_more = joined(["f(\n", "    1,\n", ")\n", *REPEATED])
    found = apply(joined(REPEATED), with_two_more, range(3, 15), change)
    assert found.splitlines(True)[3 + 7] == b"    2,\n"


@pytest.mark.parametrize(
    "other", ["one\nTWO\nthree\nfour\n", "one\ntwo\nnew\nthree\nfour\n"], ids=["edited", "between"]
)
def test_lines_that_the_earlier_patch_touched_are_refused(other: str) -> None:
    ours = made(BASE.splitlines(True), BASE.replace("two\n", "two\nours\n").splitlines(True), 1)
    theirs = made(BASE.splitlines(True), other.splitlines(True), 3)
    assert ours is not None
    assert theirs is not None
    pristine, origin = undo(other.encode(), theirs)
    with pytest.raises(PatchError, match="the earlier patch changed the same lines"):
        apply(pristine, other.encode(), origin, ours)


HEAD = "--- a/vllm/x.py\n+++ b/vllm/x.py\n"
BAD = {
    "empty": ("", "found no file"),
    "outside": ("--- a/tests/x.py\n+++ b/tests/x.py\n@@ -1 +1 @@\n-a\n+b\n", "expected a path a/vllm/"),
    "climbing": ("--- a/vllm/../x.py\n+++ b/vllm/../x.py\n@@ -1 +1 @@\n-a\n+b\n", "expected a path"),
    "no_prefix": ("--- vllm/x.py\n+++ vllm/x.py\n@@ -1 +1 @@\n-a\n+b\n", "expected a path"),
    "cut_off": (HEAD + "@@ -1,3 +1,3 @@\n a\n-b\n", "ends early"),
    "bad_header": (HEAD + "@@ nonsense\n", "not a hunk header"),
    "no_hunks": (HEAD, "expected one block of hunks"),
    "rename": ("rename from vllm/x.py\nrename to vllm/y.py\n", "expected a plain text diff"),
    "renamed_in_header": ("--- a/vllm/x.py\n+++ b/vllm/y.py\n@@ -1 +1 @@\n-a\n+b\n", "expected one block"),
    "twice": ((HEAD + "@@ -1 +1 @@\n-a\n+b\n") * 2, "expected one block"),
}


@pytest.mark.parametrize("text, message", BAD.values(), ids=BAD.keys())
def test_broken_patch_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        parse(text.encode(), "x.patch")


def test_a_missing_line_end_is_kept() -> None:
    text = HEAD + "@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+c\n\\ No newline at end of file\n"
    assert apply(b"a\nb", b"a\nb", None, parse(text.encode(), "x")["vllm/x.py"]) == b"a\nc"


def test_a_path_that_is_no_text_is_another_file() -> None:
    text = b"--- a/vllm/\xff.py\n+++ b/vllm/\xff.py\n@@ -1 +1 @@\n-a\n+b\n"
    assert list(parse(text, "x.patch")) == [r"vllm/\xff.py"]
