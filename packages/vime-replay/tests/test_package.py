# SPDX-License-Identifier: Apache-2.0
"""The package imports with its smallest install, and states its version."""

import subprocess
import sys
from importlib.metadata import version

import vime_replay

MODULES = (
    "cli codec continuation errors files inspection layout metrics pack report rows sinks sources spec store"
)


def test_version_matches_the_metadata() -> None:
    assert vime_replay.__version__ == version("vime-replay")


def test_the_core_needs_numpy_and_the_wire_only() -> None:
    """Extras cannot be imported here; a set encoding says which one it wants."""
    code = f"""
import sys
for name in ("torch", "zstandard", "safetensors", "megatron"):
    sys.modules[name] = None
import importlib
for name in "{MODULES}".split():
    importlib.import_module(f"vime_replay.{{name}}")
import numpy as np
from vime_replay.codec import encode_rows
from vime_replay.errors import ReplayConfigError
from vime_replay.spec import ReplaySpec
spec = ReplaySpec("indexer", "k", 1, 1, {{0: 0}})
rows = np.zeros((3, 1, 1), np.int32)
encode_rows(rows, spec, "u16")
try:
    encode_rows(rows, spec, "set-delta-z")
except ReplayConfigError as error:
    assert "vime-replay[store]" in str(error)
else:
    raise SystemExit("expected an error that names the extra")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
