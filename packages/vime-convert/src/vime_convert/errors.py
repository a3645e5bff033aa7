# SPDX-License-Identifier: Apache-2.0
"""The errors of vime-convert, one class per thing a caller can do about it.

Every message says which thing, what was expected, what was found and what to do, so the command line prints
it without a traceback.
"""

from collections.abc import Sequence


class ConvertError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ConvertError, ValueError):
    """A `config.json` that describes a model outside what is supported, or contradicts itself."""


class CheckpointError(ConvertError):
    """A checkpoint on disk that cannot be read as the model its config describes."""


class NamesError(ConvertError, LookupError):
    """A parameter name that no rule covers, or a dialect that does not exist."""


class OutputError(ConvertError):
    """A place where nothing can be written: it exists already, or the disk is too small."""


class MissingExtra(ConvertError, ImportError):
    """An optional dependency is absent; the message names the extra that brings it."""


LISTED = 10
"""Problems spelled out in one message; the rest is a count."""


def raise_problems(where: str, problems: Sequence[str], advice: str) -> None:
    """Raises one `CheckpointError` with the first problems and a count of the others; none: returns."""
    if not problems:
        return
    lines = [f"{where}: {len(problems)} problem{'s' if len(problems) > 1 else ''}"]
    lines += [f"  - {problem}" for problem in problems[:LISTED]]
    if len(problems) > LISTED:
        lines.append(f"  … and {len(problems) - LISTED} more")
    raise CheckpointError("\n".join([*lines, f"  {advice}"]))
