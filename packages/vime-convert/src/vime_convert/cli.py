# SPDX-License-Identifier: Apache-2.0
"""The `vime-convert` command.

Exit status: 0 done, 1 a bad checkpoint or a difference, 2 the command could not run as asked (arguments, missing
packages, no place to write, or a fault of this program), 130 or 143 stopped by SIGINT or SIGTERM.
"""

import argparse
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from vime_convert import __version__
from vime_convert.errors import CheckpointError, ConvertError, MissingExtra
from vime_convert.hosts import quiet_hosts
from vime_convert.inspection import inspect
from vime_convert.plugin import PluginError, installed, load_plugin
from vime_convert.reader import read_json
from vime_convert.registry import TABLES, table_for
from vime_convert.writer import SHARD_BYTES

OK, BAD, UNUSABLE = 0, 1, 2
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; the exit status."""
    arguments = _parser().parse_args(argv)
    if getattr(arguments, "device", "cuda") == "cpu":
        # Megatron asks torch.cuda in many places. On a machine with GPUs a CPU run works only if they are hidden
        # before anything has looked for them.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _show_own_warnings()
    quiet_hosts()
    try:
        with _unwinding_on_sigterm():
            return arguments.run(arguments)
    except CheckpointError as error:
        return _failed(error, BAD, arguments.debug)
    except (ConvertError, PluginError, MissingExtra, OSError) as error:
        return _failed(error, UNUSABLE, arguments.debug)
    except KeyboardInterrupt:
        sys.stderr.write("vime-convert: interrupted\n")
        return INTERRUPTED
    except Exception as error:
        # The outermost boundary: Python would exit with 1, which here means a bad checkpoint.
        text = f"unexpected {type(error).__name__}: {error}; run again with --debug for the traceback"
        return _failed(error, UNUSABLE, arguments.debug, text)


@contextmanager
def _unwinding_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM unwind the stack as Ctrl-C does, so that unfinished output is removed."""

    def stop(_number: int, _frame: object) -> None:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show_own_warnings() -> None:
    # Not basicConfig: that would put this command's name before the warnings of other packages.
    logger = logging.getLogger("vime_convert")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("vime-convert: %(message)s"))
        logger.addHandler(handler)


def _failed(error: Exception, status: int, debug: bool, text: str = "") -> int:
    if debug:
        raise error
    sys.stderr.write(f"vime-convert: {text or error}\n")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vime-convert",
        description="Hugging Face checkpoints to Megatron and back, bitwise.",
        epilog="Exit status: 0 done, 1 a bad checkpoint or a difference, 2 the command could not run as asked.",
    )
    parser.add_argument("--version", action="version", version=f"vime-convert {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_list(verbs)
    _add_inspect(verbs)
    _add_make_tiny(verbs)
    _add_hf2hf(verbs)
    _add_hf2dist(verbs)
    _add_dist2hf(verbs)
    import_module("vime_convert.verify.cli").add_parser(verbs)
    return parser


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, *paths: str
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    for path in paths:
        parser.add_argument(path, type=Path, metavar=path.upper())
    parser.add_argument("--plugin", metavar="MODULE:ATTR", help="take the model from here")
    parser.set_defaults(run=run)
    return parser


def _add_list(verbs: Any) -> None:
    _verb(verbs, "list", _list, "print the known model types and their dialects")


def _list(arguments: argparse.Namespace) -> int:
    plugins = installed()
    for model_type in sorted({*TABLES, *plugins}):
        built = "can be built in Megatron" if model_type in plugins else "names only"
        sys.stdout.write(f"{model_type:<14}{built:<26}{plugins.get(model_type, '')}".rstrip() + "\n")
    return OK


def _add_inspect(verbs: Any) -> None:
    parser = _verb(
        verbs, "inspect", _inspect, "describe a checkpoint and list what is wrong with it", "directory"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def _inspect(arguments: argparse.Namespace) -> int:
    found = inspect(arguments.directory, arguments.plugin)
    sys.stdout.write((json.dumps(found.as_json(), indent=2) if arguments.json else found.as_text()) + "\n")
    return BAD if found.problem else OK


def _add_make_tiny(verbs: Any) -> None:
    parser = _verb(verbs, "make-tiny", _make_tiny, "write a small seeded random checkpoint", "target")
    parser.add_argument("--model-type", required=True)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--case", metavar="NAME", help="one of the model's tiny cases; the default is the first"
    )
    source.add_argument("--config", type=Path, metavar="FILE", help="a config.json to follow")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dialect", default="release")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="instead of what the release stores")


def _make_tiny(arguments: argparse.Namespace) -> int:
    from vime_convert.tiny import make_tiny

    plugin = load_plugin(arguments.model_type, arguments.plugin)
    if arguments.config:
        config = read_json(arguments.config)
    else:
        cases = {case.name: case.config for case in plugin.tiny_cases}
        name = arguments.case or next(iter(cases))
        if name not in cases:
            raise ConvertError(f"--case: expected one of {', '.join(cases)}, got {name!r}")
        config = dict(cases[name])
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    options = {"seed": arguments.seed, "plugin": plugin, "dialect": arguments.dialect, "dtype": dtype}
    count = make_tiny(config, arguments.target, **options)
    return _wrote(count, arguments.target)


def _add_hf2hf(verbs: Any) -> None:
    parser = _verb(
        verbs, "hf2hf", _hf2hf, "rewrite a checkpoint in another dialect, bit for bit", "source", "target"
    )
    parser.add_argument("--dialect", required=True, help="see `vime-convert inspect`")
    parser.add_argument("--dequantise", action="store_true", help="store block-scaled weights as bfloat16")
    parser.add_argument(
        "--shard-bytes", type=_bytes, default=SHARD_BYTES, metavar="N", help="largest file, e.g. 5GB or 4GiB"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _bytes(text: str) -> int:
    units = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in units or (size := round(float(found[1]) * units[found[2]])) < 1:
        raise argparse.ArgumentTypeError(
            f"expected a number of bytes of at least 1, with or without a unit such as MB or GiB, got {text!r}"
        )
    return size


def _hf2hf(arguments: argparse.Namespace) -> int:
    from vime_convert.hf2hf import rewrite

    table = table_for(read_json(arguments.source / "config.json"), arguments.plugin)
    options = {name: getattr(arguments, name) for name in ("dequantise", "shard_bytes", "quiet")}
    return _wrote(
        rewrite(arguments.source, arguments.target, table, arguments.dialect, **options), arguments.target
    )


def _add_hf2dist(verbs: Any) -> None:
    parser = _verb(verbs, "hf2dist", _hf2dist, "write a Megatron torch_dist checkpoint", "source", "target")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="of the parameters; the default is the config's"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])


def _hf2dist(arguments: argparse.Namespace) -> int:
    from vime_convert.dist import hf2dist

    plugin = load_plugin(_model_type(arguments.source), arguments.plugin)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    count = hf2dist(arguments.source, arguments.target, plugin, dtype=dtype, device=arguments.device)
    return _wrote(count, arguments.target)


def _add_dist2hf(verbs: Any) -> None:
    text = "write a Hugging Face checkpoint from a Megatron torch_dist one"
    parser = _verb(verbs, "dist2hf", _dist2hf, text, "source", "target")
    parser.add_argument(
        "--hf-config", type=Path, required=True, metavar="DIR", help="config.json and tokenizer"
    )
    parser.add_argument("--dialect", default="release")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])


def _dist2hf(arguments: argparse.Namespace) -> int:
    from vime_convert.dist import dist2hf

    plugin = load_plugin(_model_type(arguments.hf_config), arguments.plugin)
    options = {name: getattr(arguments, name) for name in ("hf_config", "dialect", "device")}
    return _wrote(dist2hf(arguments.source, arguments.target, plugin, **options), arguments.target)


def _model_type(directory: Path) -> str:
    return str(read_json(directory / "config.json").get("model_type"))


def _wrote(count: int, target: Path) -> int:
    sys.stdout.write(f"wrote {count} tensors to {target}\n")
    return OK


if __name__ == "__main__":
    sys.exit(main())
