# SPDX-License-Identifier: Apache-2.0
"""What an earlier patch left behind, in a tree that has changed since."""

import shutil
from types import SimpleNamespace

import pytest

from vime_vllm_patch import apply
from vime_vllm_patch.errors import PatchError
from vime_vllm_patch.tree import RECEIPT, Tree

NEW_FILE = "vllm/model_executor/layers/indexer_topk_capturer.py"


def test_another_vllm_installed_over_a_patched_one(tree: Tree, fake: SimpleNamespace) -> None:
    """Installers leave files that they do not know: the stamp and the files that the patch added."""
    apply.apply(tree)
    newer = {path: text + "# newer\n" for path, text in fake.pristine.items()}
    fake.write(tree.root, newer)
    metadata = next(tree.root.glob("*.dist-info")) / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.32.0", "0.33.0"))
    now = Tree(tree.root)
    with pytest.raises(
        PatchError, match=r"0\.33\.0\+cpu was installed over it(.|\n)*run `vime-vllm-patch revert`"
    ):
        apply.apply(now)
    assert apply.revert(now)
    assert not (tree.root / NEW_FILE).exists()
    assert not (tree.root / RECEIPT.parent).exists()
    for path, text in newer.items():
        assert (tree.root / path).read_text() == text


def test_originals_that_are_gone_are_named(tree: Tree) -> None:
    apply.apply(tree)
    shutil.rmtree(tree.root / RECEIPT.parent / "originals")
    with pytest.raises(PatchError, match="expected the original; reinstall vLLM"):
        apply.revert(tree)
    assert apply.verify(tree) == []
