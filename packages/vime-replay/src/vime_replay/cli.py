# SPDX-License-Identifier: Apache-2.0
"""`vime-replay inspect BLOB`, `vime-replay report FILE…`: what a payload holds, and how a run's replay went."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vime_replay.errors import ReplayError, ReplayPayloadError
from vime_replay.inspection import inspect
from vime_replay.report import read_records, render
from vime_vllm_patch.wire import WireError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(
        "vime-replay", description="Looks into recorded picks and into replay metrics."
    )
    verbs = root.add_subparsers(dest="verb", required=True)
    look = verbs.add_parser("inspect", help="explain a payload")
    look.add_argument(
        "blob", type=Path, help="base64 text, a response (JSON), .npy, safetensors, encoded rows"
    )
    look.add_argument(
        "--hf", type=Path, metavar="DIR", help="compare with the model whose config.json is there"
    )
    look.add_argument("--ratio", type=int, help="tokens per key; guessed without --hf")
    look.add_argument("--start", type=int, default=0, help="position of the first row (default 0)")
    page = verbs.add_parser("report", help="write an HTML page of a run's metrics")
    page.add_argument("files", type=Path, nargs="+", metavar="FILE", help="written by sinks.JsonLinesSink")
    page.add_argument("--out", type=Path, default=Path("replay-report.html"), help="default: %(default)s")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb; 0 on success, 2 if the input is not what it should be."""
    options = parser().parse_args(argv)
    try:
        if options.verb == "inspect":
            for line in inspect(options.blob, hf=options.hf, ratio=options.ratio, start=options.start):
                sys.stdout.write(line + "\n")
        else:
            if options.out.resolve() in {path.resolve() for path in options.files}:
                raise ReplayPayloadError(f"--out {options.out}: expected another file than the metrics")
            page = render(read_records(options.files), options.files[0].stem)
            options.out.write_text(page)
            sys.stdout.write(f"{options.out}\n")
    except (ReplayError, WireError, OSError) as error:
        sys.stderr.write(f"vime-replay: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
