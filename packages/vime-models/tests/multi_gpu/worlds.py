# SPDX-License-Identifier: Apache-2.0
"""How many ranks this machine can start, a GPU each, and where their scripts are."""

from pathlib import Path

import torch

WORLDS = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]
DIST = Path(__file__).parents[1] / "dist"
