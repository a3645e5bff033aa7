# SPDX-License-Identifier: Apache-2.0
"""Which files a patch touches in which vLLM, and the hashes that say that they are the ones it was made on.

A manifest is named by the exact version: `manifests/0.32.0.json`. Several hashes may be accepted for one file, because
builds of one version (CPU, CUDA) may differ in it. `python -m vime_vllm_patch.manifest DIR VERSION` writes one from a
pristine tree. Left out: where a tree is and what state it is in (`tree.py`).
"""

import hashlib
import json
import sys
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vime_vllm_patch import diff
from vime_vllm_patch.diff import FileDiff
from vime_vllm_patch.errors import PatchError, Unsupported

PATCH = "vllm-indexer-topk.patch"
_DATA: Traversable = files("vime_vllm_patch")


def sha256(data: bytes) -> str:
    """The hash as hexadecimal text."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """The patch for one version of vLLM.

    Attributes:
        version: public version, without a local part such as "+cu129".
        patch: the patch file.
        pristine: accepted hashes of each file before; none for a file that the patch creates.
        patched: hash of each file after, on the first accepted file.
    """

    version: str
    patch: bytes
    pristine: dict[str, list[str]]
    patched: dict[str, str]

    @property
    def diffs(self) -> dict[str, FileDiff]:
        """The patch by path."""
        return diff.parse(self.patch, PATCH)


def supported() -> list[str]:
    """The versions that have a manifest, oldest first."""
    names = (entry.name for entry in _DATA.joinpath("manifests").iterdir())
    return sorted((name.removesuffix(".json") for name in names if name.endswith(".json")), key=Version)


def load(version: str) -> Manifest:
    """The manifest of a version; a local part of the version ("+cpu") is ignored.

    Raises:
        Unsupported: no manifest, or no version.
        PatchError: the installed patch file is not the one that the manifest was made for.
    """
    try:
        public = Version(version).public
    except InvalidVersion:
        public = version
    if public not in supported():
        advice = f"supported are {', '.join(supported())}; install one of them"
        if version == "?":
            raise Unsupported(
                f"no version of vLLM was found beside `vllm/` (its dist-info is missing); {advice}"
            )
        raise Unsupported(f"vLLM {version}: there is no patch for this version; {advice}")
    stored = json.loads(_DATA.joinpath("manifests", f"{public}.json").read_text())
    patch = read_patch(public)
    if sha256(patch) != stored["patch_sha256"]:
        raise PatchError(
            f"{PATCH} of vLLM {public} is not the file its manifest names; reinstall vime-vllm-patch"
        )
    return Manifest(public, patch, stored["pristine"], stored["patched"])


def read_patch(version: str) -> bytes:
    """The patch of the version's minor release."""
    release = Version(version).release
    return _DATA.joinpath("patches", f"{release[0]}.{release[1]}", PATCH).read_bytes()


def order() -> list[str]:
    """The patches of an image in the order in which they go on; ours is the last."""
    lines = _DATA.joinpath("patches", "order.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def build(root: Path, version: str) -> dict[str, object]:
    """The manifest of the pristine tree `root` (the folder that holds `vllm/`), as stored.

    Raises:
        PatchError: the patch does not apply to it exactly.
    """
    patch = read_patch(version)
    pristine: dict[str, list[str]] = {}
    patched: dict[str, str] = {}
    for path, change in diff.parse(patch, PATCH).items():
        before = b"" if change.creates else (root / path).read_bytes()
        pristine[path] = [] if change.creates else [sha256(before)]
        patched[path] = sha256(diff.apply(before, before, None, change))
    return {"patch_sha256": sha256(patch), "pristine": pristine, "patched": patched}


if __name__ == "__main__":
    tree, exact = Path(sys.argv[1]), sys.argv[2]
    target = Path(str(_DATA)) / "manifests" / f"{exact}.json"
    target.write_text(json.dumps(build(tree, exact), indent=1) + "\n")
