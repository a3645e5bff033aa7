# SPDX-License-Identifier: Apache-2.0
"""Megatron's arguments and torch_dist checkpoints for a training loop of your own, on either device.

`parse` does what `megatron.training.initialize` does with the command line, without its CUDA assertion;
`save` and `load` wrap `megatron.training.checkpointing`, so the files are ordinary Megatron checkpoints: model,
optimizer moments, random-number states, iteration. On the CPU the optimizer is a torch AdamW, because Megatron's own
optimizers check for CUDA tensor types; on GPUs either works. Checkpoints are written by spawned processes: a script
that saves must keep its code under `if __name__ == "__main__":`.
"""

import contextlib
import io
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vime_models.host import cpu
from vime_models.host.args import ArgsProvider, chain, check_unknown_flags

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

logger = logging.getLogger(__name__)

CPU_FLAGS = (
    "--use-cpu-initialization",
    "--transformer-impl=local",
    "--distributed-backend=gloo",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
)
# Options of a plugin decide names and arithmetic, so a checkpoint is only resumed with the same ones.
_OPTION_PREFIXES = ("dsv4_", "kimi_k3_")


def parse(argv: Sequence[str], *extra_providers: ArgsProvider | None) -> Namespace:
    """Validated Megatron arguments, registered as Megatron's global arguments.

    On the CPU (after `host.bringup.init_world`, or `host.cpu.install`) the flags in `CPU_FLAGS` come first.
    `padded_vocab_size` is set from `--vocab-size`; `variable_seq_lengths` is true with pipeline parallelism,
    because the width of what stages exchange is the model's own; the microbatch calculator is ready. What
    Megatron prints meanwhile (every argument) goes to the log at level DEBUG.

    Args:
        argv: the words of the command line, without the program's name.
        *extra_providers: `add_arguments` functions of plugins.

    Raises:
        UnknownFlagError: a misspelt plugin flag. Other unknown words end in argparse's usage error.
        ValueError: no vocabulary size.
    """
    words = [*CPU_FLAGS, *argv] if cpu.installed() else list(argv)

    def checked(parser: ArgumentParser) -> ArgumentParser:
        parser = chain(*extra_providers)(parser)
        check_unknown_flags(words, parser)
        return parser

    from megatron.core import num_microbatches_calculator as microbatches
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_args
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    printed = io.StringIO()
    with (
        cpu.cuda_literals_to_cpu(),
        _no_gpu_generation(),
        _command_line(words),
        contextlib.redirect_stdout(printed),
    ):
        args: Namespace = parse_args(checked)
        validate_args(args)
    logger.debug("%s", printed.getvalue())
    if args.padded_vocab_size is None:
        if args.vocab_size is None:
            raise ValueError("vime_models.host.training: expected --vocab-size N, got none; see config.json")
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, False
        )
    # validate_args always turns it off.
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    set_args(args)
    microbatches.unset_num_microbatches_calculator()
    microbatches.init_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        args.decrease_batch_size_if_needed,
    )
    return args


@contextlib.contextmanager
def _no_gpu_generation() -> Iterator[None]:
    # With tensor or context parallelism Megatron asks which generation the GPU is, to insist on
    # CUDA_DEVICE_MAX_CONNECTIONS before Blackwell (10). Without a GPU the question itself fails.
    from megatron.training import arguments

    asked = arguments.get_device_arch_version
    if cpu.installed():
        arguments.get_device_arch_version = lambda: 10
    try:
        yield
    finally:
        arguments.get_device_arch_version = asked


@contextlib.contextmanager
def _command_line(words: Sequence[str]) -> Iterator[None]:
    # Megatron's parser reads sys.argv and takes no list.
    given = sys.argv
    sys.argv = [given[0], *words]
    try:
        yield
    finally:
        sys.argv = given


def save(
    iteration: int,
    chunks: Sequence[torch.nn.Module],
    optimizer: "torch.optim.Optimizer | MegatronOptimizer | None" = None,
    scheduler: Any = None,
) -> None:
    """Write a torch_dist checkpoint to `--save`, under `iter_{iteration:07d}`.

    Args:
        iteration: number of finished iterations.
        chunks: model chunks of this rank, in DDP or not.
        optimizer: Adam-like torch optimizer over their parameters, or Megatron's own. Moments of the distributed
            optimizer load into another layout if they are saved with `--dist-ckpt-optim-fully-reshardable`.
        scheduler: object with state_dict and load_state_dict.

    Raises:
        ValueError: a parameter of the optimizer has no state although others have.
    """
    from megatron.training.checkpointing import save_checkpoint

    if isinstance(optimizer, torch.optim.Optimizer):
        _check_complete(chunks, optimizer)
    with cpu.cuda_literals_to_cpu():
        save_checkpoint(iteration, list(chunks), _adapter(optimizer), scheduler, 0)


def load(
    chunks: Sequence[torch.nn.Module],
    optimizer: "torch.optim.Optimizer | MegatronOptimizer | None" = None,
    scheduler: Any = None,
) -> int:
    """Restore what `save` wrote from `--load`; the number of finished iterations.

    After it, a loop that draws the same batches repeats the remaining losses bit for bit.

    Raises:
        FileNotFoundError: `--load` holds no checkpoint.
        ValueError: the checkpoint was trained with other plugin options.
    """
    from megatron.training import get_args
    from megatron.training.checkpointing import checkpoint_exists, load_checkpoint

    args = get_args()
    if not checkpoint_exists(args.load):
        raise FileNotFoundError(
            f"vime_models.host.training: expected a checkpoint in --load {args.load}, found no "
            "latest_checkpointed_iteration.txt"
        )
    with cpu.cuda_literals_to_cpu(), _steps_apart(optimizer):
        _check_options(args)
        iteration, _ = load_checkpoint(list(chunks), _adapter(optimizer), scheduler)
    return int(iteration)


def _adapter(optimizer: "torch.optim.Optimizer | MegatronOptimizer | None") -> Any:
    """Megatron's float32 optimizer around a torch one: it only lends its checkpoint format. Others as they are."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    return FP32Optimizer(optimizer, OptimizerConfig(), _empty_state)


@contextlib.contextmanager
def _steps_apart(optimizer: "torch.optim.Optimizer | MegatronOptimizer | None") -> Iterator[None]:
    """Lets Megatron's distributed optimizer load into torch's Adam, which it takes without Apex and TransformerEngine.

    It wants to know the step before there was one, and then to copy every tensor of a parameter's state from a file
    that holds no steps; so the steps that it sets are put aside until it has copied. It sets one tensor for all, which
    every parameter would count up, so each gets its own.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    adams = [
        inner for part in parts if isinstance(inner := getattr(part, "optimizer", None), torch.optim.Adam)
    ]
    steps: list[tuple[dict[str, Any], torch.Tensor]] = []

    def put_aside(adam: torch.optim.Optimizer) -> None:
        steps.extend((state, state.pop("step")) for state in adam.state.values())

    for adam in adams:
        _empty_state(adam)
    hooks = [adam.register_load_state_dict_post_hook(put_aside) for adam in adams]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for state, step in steps:
            state["step"] = step.clone()


def _empty_state(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Give every parameter zero moments, into which a checkpoint is loaded."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _check_complete(chunks: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    without = {id(parameter) for parameter in parameters if not optimizer.state[parameter]}
    if without and len(without) < len(parameters):
        names = [name for chunk in chunks for name, each in chunk.named_parameters() if id(each) in without]
        raise ValueError(
            f"vime_models.host.training: {len(names)} parameters never received a gradient, e.g. {names[0]}; "
            "freeze them with requires_grad_(False) and give the optimizer the others"
        )


def _check_options(args: Namespace) -> None:
    from megatron.core.dist_checkpointing import load_common_state_dict
    from megatron.training.checkpointing import (
        get_checkpoint_name,
        get_checkpoint_tracker_filename,
        read_metadata,
    )

    iteration, release = read_metadata(get_checkpoint_tracker_filename(args.load))
    directory = Path(get_checkpoint_name(args.load, iteration, release, return_base_dir=True))
    saved = vars(load_common_state_dict(str(directory)).get("args", Namespace()))
    for name, value in vars(args).items():
        if name.startswith(_OPTION_PREFIXES) and name in saved and saved[name] != value:
            raise ValueError(
                f"vime_models.host.training: {directory} was written with {name}={saved[name]!r}, "
                f"got {value!r}; resume with --{name.replace('_', '-')} as saved"
            )
