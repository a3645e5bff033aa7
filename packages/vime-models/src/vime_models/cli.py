# SPDX-License-Identifier: Apache-2.0
"""Launch flags and parallel layouts of a checkpoint, from its `config.json` alone.

`vime-models args` prints the Megatron flags, or compares given ones; `vime-models plan` computes memory and traffic of
a layout. Both need neither Megatron nor a device.
"""

import argparse
import json
import math
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from vime_convert.refused import refuse_known
from vime_models import plan
from vime_models.host.args import UnknownFlagError, check_unknown_flags

OK, DIFFERENT, UNUSABLE = 0, 1, 2

# Each module has `add_arguments(parser)` and `launch_flags(config) -> words`.
ARGUMENTS_OF = {"deepseek_v4": "vime_models.dsv4.arguments"}
# Each module has the counts that `vime_models.plan` reads.
SIZES_OF = {"deepseek_v4": "vime_models.dsv4.sizes"}


def split_flags(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flag and its values, from the words of a command line; of a repeated flag the last one counts.

    Raises:
        ValueError: the first word is no flag.
    """
    flags: dict[str, tuple[str, ...]] = {}
    current = ""
    for word in words:
        if word.startswith("--"):
            current, equals, value = word.partition("=")
            flags[current] = (value,) if equals else ()
        elif current:
            flags[current] += (word,)
        else:
            raise ValueError(f"vime-models: expected a flag that starts with --, got {word!r}")
    return flags


def same_values(left: Sequence[str], right: Sequence[str]) -> bool:
    """Whether two value lists mean the same: equal words, or equal numbers in another spelling."""
    return len(left) == len(right) and all(
        a == b or _number(a) == _number(b) is not None for a, b in zip(left, right, strict=True)
    )


def differences(expected: Sequence[str], given: Sequence[str]) -> list[str]:
    """One line for each flag of `expected` that `given` lacks or sets otherwise; further flags are allowed."""
    have = split_flags(given)
    lines = []
    for flag, values in split_flags(expected).items():
        wanted = shlex.join((flag, *values))
        if flag not in have:
            lines.append(f"missing: {wanted}")
        elif not same_values(values, have[flag]):
            lines.append(f"differs: expected {wanted}, got {shlex.join((flag, *have[flag]))}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 fine, 1 flags differ or the layout needs more memory, 2 unusable input."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Split here: what follows -- belongs to another program and must not be parsed.
    end = words.index("--") if "--" in words else len(words)
    own, given = words[:end], words[end + 1 :]
    options = _parser().parse_args(own)
    if given and not getattr(options, "check", False):
        sys.stderr.write("vime-models: flags after -- need --check before it\n")
        return UNUSABLE
    try:
        config = _read_config(options.hf)
        if options.command == "plan":
            return _plan(config, options)
        module = _plugin_module(ARGUMENTS_OF, config)
        expected = module.launch_flags(config)
        if not options.check:
            lines = [shlex.join((flag, *values)) for flag, values in split_flags(expected).items()]
            sys.stdout.write("\n".join(lines) + "\n")
            return OK
        problems = differences(expected, given)
        try:
            check_unknown_flags(given, module.add_arguments(ArgumentParser(allow_abbrev=False)))
        except UnknownFlagError as error:
            problems.append(str(error))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return UNUSABLE
    except Exception as error:
        # The outermost boundary: Python would exit with 1, which here means that flags differ.
        if options.debug:
            raise
        text = f"unexpected {type(error).__name__}: {error}; run again with --debug for the traceback"
        sys.stderr.write(f"vime-models: {text}\n")
        return UNUSABLE
    sys.stdout.writelines(f"{line}\n" for line in problems)
    return DIFFERENT if problems else OK


def _count(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


def _gigabytes(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="vime-models", description=__doc__.splitlines()[0])
    parser.add_argument("--debug", action="store_true", help="show the traceback of an unexpected error")
    commands = parser.add_subparsers(dest="command", required=True)
    args = commands.add_parser(
        "args",
        help="launch flags of a checkpoint",
        description="Print the Megatron flags that a checkpoint needs, one per line and quoted for a shell; "
        "or, with --check -- FLAGS, report every one that is missing or different (exit status 1).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    args.add_argument("--hf", type=Path, required=True, metavar="DIR", help="folder with config.json")
    args.add_argument("--check", action="store_true", help="compare with the flags that follow --")
    planner = commands.add_parser(
        "plan",
        help="memory and traffic of a layout",
        description="Print memory per rank, bytes sent over each group per step, and Megatron's flags. Sizes that are "
        "not given are chosen: the layout that fits with the least estimated time.",
    )
    planner.add_argument("--hf", type=Path, required=True, metavar="DIR", help="folder with config.json")
    planner.add_argument("--gpus", type=_count, required=True, metavar="N", help="all GPUs")
    for size, text in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("cp", "context")):
        planner.add_argument(
            f"--{size}", type=_count, metavar="N", help=f"{text} parallelism (default: chosen)"
        )
    planner.add_argument("--recompute", choices=plan.RECOMPUTE, help="(default: chosen)")
    planner.add_argument("--etp", type=_count, metavar="N", help="expert tensor parallelism (default: 1)")
    planner.add_argument(
        "--seq-len", type=_count, metavar="T", help=f"tokens of a microbatch (default: {plan.Layout.seq_len})"
    )
    planner.add_argument(
        "--batch",
        type=_count,
        metavar="N",
        help=f"microbatches of a step, all ranks (default: {plan.Layout.batch})",
    )
    planner.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="(default: bf16)")
    planner.add_argument(
        "--memory-gb",
        type=_gigabytes,
        default=plan.DEVICE_GB,
        metavar="GB",
        help=f"what a rank may use (default: {plan.DEVICE_GB:g}, an H200 with room for the framework)",
    )
    return parser


def _plan(config: dict[str, Any], options: argparse.Namespace) -> int:
    sizes = _plugin_module(SIZES_OF, config)
    hf = sizes.read_config(config)
    fields = ("tp", "pp", "ep", "cp", "recompute", "etp", "seq_len", "batch")
    given = {name: value for name in fields if (value := getattr(options, name)) is not None}
    width = 2 if options.dtype == "bf16" else 4
    layout = plan.Layout(options.gpus, bytes_per_value=width, **given)
    chosen = {"tp", "pp", "ep", "cp", "recompute"} - given.keys()
    if chosen:
        plan.check(hf, layout, {f"--{name.replace('_', '-')}" for name in given} - {"--batch"})
        found = plan.suggest(hf, sizes, layout, frozenset(given), options.memory_gb)
        if found is None:
            raise plan.PlanError(
                f"vime-models: no layout of {options.gpus} GPUs with the given sizes fits into "
                f"{options.memory_gb:g} GB a rank; give all sizes to see what one needs, or use more GPUs"
            )
        layout = found
    sys.stdout.write(f"{plan.text(hf, sizes, layout)}\n\n" + "\n".join(plan.flags(hf, layout)) + "\n")
    most = max(stage.total for stage in plan.stages(hf, sizes, layout)) / plan.GB
    if most > options.memory_gb:
        sys.stderr.write(
            f"vime-models: the fullest rank needs {most:.0f} GB, more than {options.memory_gb:g} GB\n"
        )
        return DIFFERENT
    return OK


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"vime-models: expected {path}, found none; --hf takes the folder of a checkpoint"
        )
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"vime-models: {path} is not JSON: {error}") from error
    return config


def _plugin_module(modules: dict[str, str], config: dict[str, Any]) -> Any:
    model_type = config.get("model_type")
    refuse_known(model_type)
    if model_type not in modules:
        raise ValueError(
            f"vime-models: expected model_type out of {', '.join(sorted(modules))}, got {model_type!r}; "
            "no plugin trains it"
        )
    return import_module(modules[model_type])


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main())
