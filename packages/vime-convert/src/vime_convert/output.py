# SPDX-License-Identifier: Apache-2.0
"""Output directories that appear complete or not at all.

Everything is written to a sibling `.NAME.partial` and renamed at the end. A lock held by the kernel tells a
directory that is being written from the remains of a killed process, which the next run removes.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vime_convert.errors import OutputError

logger = logging.getLogger(__name__)


@contextmanager
def staged(target: str | Path, *, need_bytes: int = 0) -> Iterator[Path]:
    """A directory to write into; it becomes `target` when the block ends, and vanishes if the block raises.

    Args:
        target: the final directory; must not exist, or be empty.
        need_bytes: refuse at once if the file system has less room than this.

    Raises:
        OutputError: the target exists, nothing can be written there, another process writes it, or there is too
            little space.
    """
    target = Path(target).absolute()
    refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial"
    lock_path = target.parent / f".{target.name}.lock"
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"{target}: another process is writing it; wait for it or choose another path"
            ) from None
        try:
            if partial.exists():
                logger.warning("%s: removing what an interrupted run left behind", partial)
                shutil.rmtree(partial)
            _check_space(target, need_bytes)
            partial.mkdir()
            yield partial
            _flush(partial)
            partial.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock_path.unlink(missing_ok=True)


def refuse_existing(target: Path) -> None:
    """Raises `OutputError` if something is at `target` or nothing can be; an empty directory is allowed."""
    if target.is_symlink():
        # The rename at the end would have to replace the link, and the directory behind it would stay empty.
        raise OutputError(
            f"{target}: expected a path that is no symbolic link; pass {target.readlink()} itself"
        )
    place = next(path for path in target.absolute().parents if path.exists())
    if not place.is_dir():
        raise OutputError(f"{target}: {place} is not a directory; choose another path")
    if not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(
            f"{target}: {place} cannot be written to; choose another path or change its permissions"
        )
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        raise OutputError(
            f"{target}: expected a path that does not exist yet; choose another or remove it first"
        )


def _check_space(target: Path, need_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < need_bytes:
        raise OutputError(
            f"{target}: needs {need_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on its file system; "
            "free some space or choose another path"
        )


def _flush(directory: Path) -> None:
    """Forces file contents to disk: a rename that survives a power cut must not point at empty files."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
