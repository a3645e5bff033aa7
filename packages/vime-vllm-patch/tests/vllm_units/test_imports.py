# SPDX-License-Identifier: Apache-2.0
"""Every module that the patch touches imports on a machine without a GPU."""

import json
import os
from importlib import import_module
from pathlib import Path

import pytest

RECEIPT = (
    Path(os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]) / "vllm/.vime-patch/vllm-indexer-topk.json"
)
TOUCHED = list(json.loads(RECEIPT.read_text())["after"]) if RECEIPT.exists() else []


def test_the_tree_was_patched_by_the_tool() -> None:
    assert TOUCHED, f"{RECEIPT} is missing; run `nox -s patch_check`"


@pytest.mark.parametrize("path", TOUCHED)
def test_it_imports(path: str) -> None:
    import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
