# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints to Megatron's `torch_dist` format and back.

The directory is one that Megatron's `--load` takes: `release/` with the weights and a tracker file that says
`release`, so a trainer starts at iteration 0 without optimizer state. Any tensor, pipeline or expert parallel layout
can load it. Not written: Megatron's argument namespace, because the trainer's own command line decides.

The process that calls these must be started under an `if __name__ == "__main__":` guard (the console command is):
Megatron's writer spawns processes, which import the main module again.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException

from vime_convert.checkpoint import Checkpoint
from vime_convert.errors import LISTED, CheckpointError, ConfigError, MissingExtra, raise_problems
from vime_convert.megatron.exporter import save_hf
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.output import refuse_existing, staged
from vime_convert.plugin import ModelPlugin
from vime_convert.reader import CheckpointReader, read_json
from vime_convert.rules import RuleTable

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_COMMON_KEY = "vime_convert"
# Sharded state of a training run that is not the model's.
_TRAINER_KEYS = ("optimizer", "rng_state", "rerun_state", "opt_param_scheduler")


def hf2dist(
    source: str | Path,
    target: str | Path,
    plugin: ModelPlugin,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> int:
    """The number of parameters and buffers written to the Megatron checkpoint `target`.

    Nothing is rounded: a parameter that would lose precision is refused.

    Args:
        source: Hugging Face checkpoint directory, any dialect.
        target: must not exist, or be an empty directory.
        plugin: the model.
        dtype: of the parameters, bfloat16 or float32, except those that the model keeps in float32; the default is
            what the config says, otherwise bfloat16.
        device: where to build the model.

    Raises:
        CheckpointError: the source is no complete checkpoint of the model, or `dtype` does not hold its values.
        OutputError: the target exists or the disk is too small.
        MissingExtra: megatron-core is not installed.
    """
    checkpointing = _megatron()
    _refuse_many_processes()
    refuse_existing(Path(target))
    reader = CheckpointReader(source)
    config = reader.config()
    dtype = dtype or _config_dtype(config)
    plugin.setup(device)
    chunks = plugin.build(config, dtype=dtype, device=device)
    report = load_checkpoint(chunks, reader, plugin.rules(config))
    if report.narrowed:
        raise CheckpointError(
            f"{source}: {len(report.narrowed)} parameters do not fit into {_word(dtype)} without rounding, first "
            f"{', '.join(report.narrowed[:LISTED])}; pass --dtype float32"
        )
    with staged(target, need_bytes=report.nbytes) as directory:
        (directory / "release").mkdir()
        state = _sharded(chunks) | {
            "checkpoint_version": 3.0,
            "iteration": 0,
            _COMMON_KEY: {"config": config},
        }
        checkpointing.save(state, str(directory / "release"))
        (directory / TRACKER).write_text("release")
    return report.tensors


def dist2hf(
    source: str | Path,
    target: str | Path,
    plugin: ModelPlugin,
    *,
    hf_config: str | Path,
    dialect: str = "release",
    device: str = "cpu",
) -> int:
    """The number of tensors of the Hugging Face checkpoint written to `target`.

    Args:
        source: what Megatron's `--save` wrote (the tracker file names the iteration), or one iteration's directory.
        target: must not exist, or be an empty directory.
        plugin: the model.
        hf_config: checkpoint directory with the model's `config.json` and tokenizer files; draft layers that it holds
            are carried over, in bfloat16 where they are block-scaled.
        dialect: in which to write.
        device: where to build the model.

    Raises:
        CheckpointError: no Megatron checkpoint there, or it lacks a parameter of the model.
        OutputError: the target exists, the disk is too small, or the dialect is read only.
        MissingExtra: megatron-core is not installed.
    """
    checkpointing = _megatron()
    _refuse_many_processes()
    refuse_existing(Path(target))
    directory = weights_directory(Path(source))
    config = read_json(Path(hf_config) / "config.json")
    table = plugin.rules(config)
    stored = _stored(checkpointing, directory)
    drafts = _drafts(Path(hf_config), config, table)
    plugin.setup(device)
    chunks = plugin.build(config, dtype=_main_dtype(stored), device=device)
    wanted = _sharded(chunks)
    advice = "check that --hf-config belongs to the model that was trained"
    raise_problems(str(directory), _differences(_tensors(_sharded(chunks)), stored), advice)
    try:
        loaded = checkpointing.load(wanted, str(directory))
    except (checkpointing.core.CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"{directory}: {error}; copy the checkpoint again") from error
    for key, chunk in zip(wanted, chunks, strict=True):
        chunk.load_state_dict(loaded[key])
    return save_hf(chunks, table, target, dialect=dialect, dtype="keep", like=drafts, config_from=hf_config)


def weights_directory(source: Path) -> Path:
    """The directory with the weights: of the iteration in the tracker file, or `source` itself.

    Raises:
        CheckpointError: neither is there.
    """
    tracker = source / TRACKER
    if tracker.is_file():
        word = tracker.read_text().strip()
        if word != "release" and not re.fullmatch(r"\d+", word):
            raise CheckpointError(f"{tracker}: expected 'release' or an iteration number, got {word!r}")
        source = source / (word if word == "release" else f"iter_{int(word):07d}")
    if not (source / "metadata.json").is_file():
        raise CheckpointError(f"{source}: expected a torch_dist checkpoint (metadata.json), found none")
    return source


def _config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    said = config.get("dtype") or config.get("torch_dtype")
    return torch.float32 if said == "float32" else torch.bfloat16


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _drafts(hf_config: Path, config: Mapping[str, Any], table: RuleTable) -> Checkpoint | None:
    """The checkpoint whose draft layers go into the output; None, with a warning, where a promised one is absent."""
    count = config.get("num_nextn_predict_layers")
    if not count:
        return None
    if any(hf_config.glob("*.safetensors")):
        checkpoint = Checkpoint(CheckpointReader(hf_config), table)
        if checkpoint.extras:
            return checkpoint
    logger.warning(
        "the output has no draft layers, although config.json says num_nextn_predict_layers = %s: "
        "Megatron does not hold them, and %s has none to carry over",
        *(count, hf_config),
    )
    return None


def _stored(checkpointing: Any, directory: Path) -> dict[str, Any]:
    """The model's tensors in a Megatron checkpoint, without their values."""
    try:
        stored = checkpointing.load_tensors_metadata(str(directory))
    except Exception as error:  # what unpickling damaged metadata raises is not limited to any class
        raise CheckpointError(
            f"{directory}: its metadata cannot be read ({type(error).__name__}: {error}); copy the checkpoint again"
        ) from error
    return {key: tensor for key, tensor in stored.items() if not key.startswith(_TRAINER_KEYS)}


def _main_dtype(stored: Mapping[str, Any]) -> torch.dtype:
    """The floating dtype of most stored values: that of the parameters which are not kept in float32."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in stored.values():
        sizes[tensor.dtype] += math.prod(tensor.global_shape)
    return torch.float32 if sizes[torch.float32] > sizes[torch.bfloat16] else torch.bfloat16


def _refuse_many_processes() -> None:
    # Each would stage an output of its own.
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ConfigError("vime_convert.dist: runs in one process; start it without torchrun")


def _megatron() -> Any:
    try:
        from megatron.core import dist_checkpointing
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"vime_convert.dist: needs {error.name!r}, which is not installed; pip install 'vime-convert[mbridge]'"
        ) from error
    return dist_checkpointing


def _sharded(chunks: list[Any]) -> dict[str, Any]:
    keys = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    return {key: chunk.sharded_state_dict() for key, chunk in zip(keys, chunks, strict=True)}


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The sharded tensors of a state dict by the keys under which a checkpoint stores them."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(state)
    return {value.key: value for value in nested_values(state) if isinstance(value, ShardedTensor)}


def _differences(needed: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    problems = [f"{key}: not in the checkpoint" for key in sorted(needed.keys() - stored.keys())]
    problems += [f"{key}: no parameter of this model" for key in sorted(stored.keys() - needed.keys())]
    for key in sorted(needed.keys() & stored.keys()):
        ours, theirs = needed[key], stored[key]
        # Megatron marks what it may pad differently: vocabulary rows.
        if not ours.allow_shape_mismatch and tuple(ours.global_shape) != tuple(theirs.global_shape):
            problems.append(f"{key}: expected {list(ours.global_shape)}, got {list(theirs.global_shape)}")
        if torch.promote_types(ours.dtype, theirs.dtype) != ours.dtype:
            problems.append(
                f"{key}: stored as {_word(theirs.dtype)}, the model keeps it in {_word(ours.dtype)}"
            )
    return problems
