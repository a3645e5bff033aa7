# SPDX-License-Identifier: Apache-2.0
"""Progress bars on standard error, silent when nobody watches."""

import sys
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]


def progress(*, total: int | None = None, description: str = "", quiet: bool = False) -> Any:
    """A tqdm bar; disabled when `quiet` or when standard error is not a terminal."""
    off = quiet or not sys.stderr.isatty()
    return tqdm(total=total, desc=description, disable=off, file=sys.stderr, dynamic_ncols=True, leave=False)
