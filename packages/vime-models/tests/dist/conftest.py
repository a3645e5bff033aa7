# SPDX-License-Identifier: Apache-2.0
"""Makes the modules beside the tests importable (`from harness import launch`), as they are for the workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
