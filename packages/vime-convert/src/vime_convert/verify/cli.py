# SPDX-License-Identifier: Apache-2.0
"""`vime-convert verify`: prove that Megatron and transformers are the same function on a checkpoint."""

import argparse
import platform
import shutil
import sys
import tempfile
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vime_convert.errors import CheckpointError, ConvertError
from vime_convert.plugin import ModelPlugin, PluginError, TinyCase, load_plugin

PASS, MISMATCH, ENVIRONMENT = 0, 1, 2


def add_parser(verbs: Any) -> None:
    """Adds the verb with its options to the subparsers of `vime-convert`."""
    parser = verbs.add_parser(
        "verify",
        help="compare a checkpoint in Megatron with transformers and round-trip it bitwise",
        description="Exit status: 0 everything equal, 1 a difference was found, 2 the comparison could not run.",
    )
    parser.add_argument(
        "--model-type", required=True, help="model_type of the Hugging Face config, e.g. deepseek_v4"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--tiny", action="store_true", help="verify small seeded random checkpoints (the default)"
    )
    source.add_argument("--hf", type=Path, metavar="DIR", help="verify this checkpoint")
    parser.add_argument("--num-layers", type=int, metavar="K", help="with --hf: use only the first K layers")
    parser.add_argument("--seq-len", type=int, default=320, help="with --hf: tokens of the sequence")
    parser.add_argument("--cases", type=int, metavar="N", help="with --tiny: only the first N cases")
    parser.add_argument(
        "--case", action="append", metavar="NAME", help="with --tiny: only this case (repeatable)"
    )
    parser.add_argument("--checks", default="logits,grad,roundtrip", help="comma-separated subset")
    parser.add_argument("--dtype", default=None, help="comma-separated: float64, float32, bfloat16")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and token ids")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write FILE.json, FILE.html and FILE.svg (the first plot)"
    )
    parser.add_argument(
        "--plugin", metavar="MODULE:ATTR", help="take the model from here instead of entry points"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def _choice(text: str, known: tuple[str, ...], flag: str) -> list[str]:
    words = [word for word in text.split(",") if word]
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise ConvertError(f"{flag}: expected a comma-separated subset of {', '.join(known)}, got {text!r}")
    return words


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "megatron-core", "vime-convert", "vime-models", "vime-kernels"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; prints the table and returns the exit status."""
    try:
        plugin = load_plugin(arguments.model_type, arguments.plugin)
        plugin.setup(arguments.device)
    except (PluginError, ImportError, RuntimeError) as error:  # RuntimeError: the device cannot be used
        sys.stderr.write(f"{error}\n")
        return ENVIRONMENT
    try:
        return _verify(plugin, arguments)
    except CheckpointError:
        # The directory is not the model that its config describes, which is a finding: as for every other verb.
        raise
    except (ConvertError, ImportError) as error:
        sys.stderr.write(f"vime-convert verify: {error}\n")
        return ENVIRONMENT


def _verify(plugin: ModelPlugin, arguments: argparse.Namespace) -> int:
    # Imported here: these need transformers and Megatron, which the other verbs do not.
    from vime_convert.progress import progress
    from vime_convert.verify import report
    from vime_convert.verify.case import CHECKS, run_case
    from vime_convert.verify.precision import PRECISIONS

    if arguments.seq_len < 2:
        raise ConvertError(f"--seq-len: expected at least 2 tokens, got {arguments.seq_len}")
    if arguments.num_layers is not None and not arguments.hf:
        raise ConvertError("--num-layers: cuts a checkpoint, so it needs --hf DIR")
    if arguments.cases is not None and arguments.cases < 1:
        raise ConvertError(f"--cases: expected at least 1, got {arguments.cases}")
    checks = _choice(arguments.checks, CHECKS, "--checks")
    default = "float32" if arguments.hf else "float64,float32,bfloat16"
    dtypes = _choice(arguments.dtype or default, tuple(PRECISIONS), "--dtype")
    results = []
    with tempfile.TemporaryDirectory(prefix="vime-verify-") as scratch:
        cases = _cases(plugin, arguments, Path(scratch))
        steps = len(cases) * (
            2 * len(dtypes) * ("logits" in checks or "grad" in checks) + ("roundtrip" in checks)
        )
        with progress(total=steps, description=arguments.model_type, quiet=arguments.quiet) as bar:

            def tick(step: str) -> None:
                bar.set_postfix_str(step)
                bar.update(1)

            for name, directory, seq_len, covers in cases:
                result = run_case(
                    plugin,
                    directory(),
                    name=name,
                    seq_len=seq_len,
                    covers=covers,
                    checks=checks,
                    precisions=dtypes,
                    device=arguments.device,
                    seed=arguments.seed,
                    tick=tick,
                )
                results.append(result)
    sys.stdout.write(report.table(results) + "\n")
    if arguments.report:
        about = {
            "model_type": plugin.model_type,
            "device": arguments.device,
            "seed": arguments.seed,
            **_versions(),
        }
        for path in report.write_all(arguments.report, results, about):
            sys.stdout.write(f"wrote {path}\n")
    return PASS if report.verdict(results) == "PASS" else MISMATCH


def _cases(
    plugin: ModelPlugin, arguments: argparse.Namespace, scratch: Path
) -> list[tuple[str, Any, int, str]]:
    """(name, maker of the checkpoint directory, sequence length, what it covers) for every case to run."""
    from vime_convert.hf2hf import rewrite
    from vime_convert.reader import read_json
    from vime_convert.refused import refuse_known
    from vime_convert.tiny import make_tiny, truncate

    if arguments.hf:
        config = read_json(arguments.hf / "config.json")
        refuse_known(config.get("model_type"))
        if config.get("model_type") != plugin.model_type:
            raise ConvertError(
                f"{arguments.hf}: model_type {config.get('model_type')!r}, expected {plugin.model_type!r}"
            )
        layers = config["num_hidden_layers"] if arguments.num_layers is None else arguments.num_layers

        def first_layers() -> Path:
            """The layers as transformers reads them on any device: plain weights under release names."""
            truncate(arguments.hf, scratch / "stored", layers, plugin)
            table = plugin.rules(read_json(scratch / "stored" / "config.json"))
            rewrite(scratch / "stored", scratch / "hf", table, table.dialects[0].name, dequantise=True)
            shutil.rmtree(scratch / "stored")
            return scratch / "hf"

        covers = f"first {layers} layers of {arguments.hf}"
        return [(arguments.hf.name, first_layers, arguments.seq_len, covers)]
    cases = list(plugin.tiny_cases)
    if arguments.case:
        names = [case.name for case in cases]
        unknown = sorted(set(arguments.case) - set(names))
        if unknown:
            raise ConvertError(f"--case: no case named {', '.join(unknown)}; known: {', '.join(names)}")
        cases = [case for case in cases if case.name in arguments.case]
    if arguments.cases is not None:
        cases = cases[: arguments.cases]

    def tiny(case: TinyCase) -> Path:
        make_tiny(case.config, scratch / case.name, seed=arguments.seed, plugin=plugin)
        return scratch / case.name

    return [(case.name, partial(tiny, case), case.seq_len, case.covers) for case in cases]
