# SPDX-License-Identifier: Apache-2.0
"""The `vime-vllm-patch` command.

Exit status: 0 done or nothing to do, 1 the command could not run (no access, bad files), 2 the tree is not one that the
patch fits, or the arguments are wrong, 3 there is no patch for this version of vLLM.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vime_vllm_patch import __version__, apply
from vime_vllm_patch.errors import PatchError
from vime_vllm_patch.tree import Tree, find

OK, FAILED, REFUSED = 0, 1, 2
VERBS = {
    "check": "say whether the patch fits, and what it would change",
    "apply": "patch vLLM; nothing happens if it is patched already",
    "revert": "put back every byte",
    "status": "print version and state",
    "verify": "check that a patched vLLM is as `apply` left it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments.verb, find(arguments.vllm), getattr(arguments, "after", None))
    except PatchError as error:
        sys.stderr.write(f"vime-vllm-patch: {error}\n")
        return error.status
    except OSError as error:
        sys.stderr.write(f"vime-vllm-patch: {error}\n")
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vime-vllm-patch",
        description="Lets an installed vLLM return the indexer's top-k picks. vLLM is not imported.",
        epilog="Exit status: 0 done, 1 could not run, 2 the tree does not fit or wrong arguments, 3 no patch for it.",
    )
    parser.add_argument("--version", action="version", version=f"vime-vllm-patch {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, text in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        verb.add_argument(
            "--vllm",
            type=Path,
            metavar="DIR",
            help="folder that holds vllm/ (site-packages, unpacked wheel, checkout); default: this interpreter's",
        )
        if name in ("check", "apply", "status"):
            verb.add_argument(
                "--after",
                type=Path,
                metavar="FILE",
                help="a patch that is already in there, e.g. vime's vllm.patch",
            )
    return parser


def _run(verb: str, tree: Tree, earlier: Path | None) -> int:
    if tree.native:
        _say(f"{tree.root}: vLLM {tree.version}: native; it has the channel of its own, nothing to do")
        return OK
    if verb == "status":
        found = tree.inspect(earlier)
        _say(f"{tree.root}: vLLM {tree.version}: {found.state}", *found.reasons)
        return OK if found.state.startswith(("clean", "patched")) else REFUSED
    if verb == "verify":
        problems = apply.verify(tree)
        _say(*problems or [f"{tree.root}: vLLM {tree.version} is patched and complete"])
        return REFUSED if problems else OK
    if verb == "check":
        files = apply.plan(tree, earlier)
        changes = tree.manifest.diffs
        _say(*(f"{path}: {len(changes[path].hunks)} hunk(s)" for path in files))
        _say(f"{tree.root}: the patch fits vLLM {tree.version}" if files else f"{tree.root}: already patched")
    elif verb == "apply":
        changed = apply.apply(tree, earlier)
        _say(f"{tree.root}: vLLM {tree.version} " + ("patched" if changed else "was patched already"))
    else:
        changed = apply.revert(tree)
        _say(f"{tree.root}: vLLM {tree.version} " + ("is as it was before" if changed else "was not patched"))
    return OK


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
