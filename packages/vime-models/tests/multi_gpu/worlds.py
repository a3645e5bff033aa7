# SPDX-License-Identifier: Apache-2.0
"""How many ranks this machine can start, a GPU each, and where their scripts are."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

SIZES = (2, 4, 8)
WORLDS = [size for size in SIZES if size <= torch.cuda.device_count()]
# Their tests do not exist here; the summary says so.
NOT_HERE = [size for size in SIZES if size not in WORLDS]
DIST = Path(__file__).parents[1] / "dist"


def record_largest(
    record: Callable[[str, object], None], ranks: Sequence[dict[str, Any]], *names: str
) -> None:
    """Puts the largest value over ranks into the test's report."""
    for name in names:
        record(name, max(rank[name] for rank in ranks))
