# SPDX-License-Identifier: Apache-2.0
"""vime's rollout side: ask for rows, take them from a response, keep them with the sample or on disk."""

import uuid
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from vime_replay.continuation import append_rows, fill_tail, request_start
from vime_replay.errors import ReplayConfigError, ReplayDecodeError
from vime_replay.integrations.vime.arguments import spec_of
from vime_replay.rows import Picks, decode_rows
from vime_replay.sources import as_source

FIELD = "rollout_indexer_topk"


def request_parameters(args: Namespace, sample: Any) -> dict[str, int]:
    """What to add to the sampling parameters of the sample's next request; nothing when replay is off.

    Args:
        args: vime's arguments.
        sample: with the tokens that the request sends.
    """
    if not getattr(args, "use_rollout_indexer_replay", False):
        return {}
    return {"indexer_topk_prompt_start": request_start(held_rows(sample), len(sample.tokens), sample.index)}


def apply_choice(args: Namespace, sample: Any, choice: dict[str, Any], *, start: int) -> None:
    """Appends the rows of a response to the sample; call it after its tokens were appended.

    Args:
        args: vime's arguments.
        sample: the sample, whose `rollout_indexer_topk` is replaced.
        choice: one choice of the server's response. A null field of an aborted request keeps what is held.
        start: `indexer_topk_prompt_start` of the request.

    Raises:
        ReplayDecodeError: no field, no rows though the request ran, or rows that do not fit the tokens.
        ReplayConfigError: rows of other layers than the model's.
    """
    if not getattr(args, "use_rollout_indexer_replay", False):
        return
    spec = spec_of(args)
    if "indexer_topk" not in choice:
        raise ReplayDecodeError(
            "wire.type",
            sample.index,
            "expected the field indexer_topk in the response, got none; start the server with "
            "--enable-return-indexer-topk, on a vLLM that `vime-vllm-patch status` calls patched",
        )
    if choice.get("indexer_topk_layer_ids") is not None:
        spec.check_layer_ids(choice["indexer_topk_layer_ids"])
    if choice["indexer_topk"] is None:
        # vime's meta_info may not say why a request ended; the trainer then names the sample without rows.
        if choice.get("finish_reason") not in (None, "abort"):
            raise ReplayDecodeError(
                "wire.type",
                sample.index,
                f"expected rows in indexer_topk, got null after finish_reason {choice['finish_reason']!r}; start the "
                "server with --enable-return-indexer-topk, and do not send return_indexer_topk=false",
            )
        return
    new = decode_rows(
        choice["indexer_topk"],
        spec,
        num_tokens=len(sample.tokens),
        start=start,
        level=args.indexer_replay_validate,
        missing=args.indexer_replay_missing,
        sample=sample.index,
    )
    if new is None:
        # To be dropped: vime takes no loss from such a sample, and its rows are computed.
        sample.remove_sample = True
        shape = (max(len(sample.tokens) - 1, 0), spec.num_streams, spec.topk)
        setattr(sample, FIELD, np.full(shape, -1, np.int32))
        return
    held = held_rows(sample)
    rows = append_rows(held, new, spec=spec, num_tokens=len(sample.tokens), start=start, sample=sample.index)
    setattr(sample, FIELD, rows)


def rows_of_meta_info(meta_info: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The fields of `apply_choice` from vime's `meta_info` of a response: (choice, start)."""
    choice: dict[str, Any] = {
        key: meta_info[key] for key in ("indexer_topk", "indexer_topk_layer_ids") if key in meta_info
    }
    return choice, int(meta_info.get("indexer_topk_start_len", 0))


def held_rows(sample: Any) -> Picks | None:
    """Rows that the sample holds, in memory; None for none."""
    value = getattr(sample, FIELD, None)
    if value is None or isinstance(value, np.ndarray):
        return value
    source = as_source(value)
    rows, streams, width = source.shape
    held = np.empty((streams, rows, width), np.int32)
    source.read_into(held, rows=slice(0, rows), streams=range(streams))
    return held.transpose(1, 0, 2)


async def spill_indexer_topk(
    args: Namespace, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False
) -> Any:
    """A hook for `--rollout-sample-hook-path`: replaces the sample's rows by a reference to a file.

    Evaluation drops rows. An aborted sample keeps them in memory: it resumes after this rollout's directory is gone.
    A sample without loss gets rows of -1 for tokens that no pass saw. The file is written before the next response is
    handled, so that finished samples do not pile up.

    Args:
        args: vime's arguments, with `rollout_indexer_topk_store_dir`.
        sample: the finished sample.
        rollout_id: names the directory.
        evaluation: whether the sample is for evaluation.

    Raises:
        ReplayConfigError: no directory was given.
        ReplayDecodeError: rows that do not fit the tokens.
    """
    if evaluation:
        setattr(sample, FIELD, None)
        return sample
    if sample.status == type(sample).Status.ABORTED:
        return sample
    directory = getattr(args, "rollout_indexer_topk_store_dir", None)
    if not directory:
        raise ReplayConfigError(
            "spill_indexer_topk: expected --rollout-indexer-topk-store-dir, got none; name a directory that rollout "
            "and trainer share"
        )
    target = Path(directory) / f"rollout_{'unknown' if rollout_id is None else f'{int(rollout_id):08d}'}"
    path = target / f"sample_{sample.index}_{uuid.uuid4().hex}.safetensors"
    reference = import_module("vime.data.tensor").DiskTensorRef
    value = getattr(sample, FIELD, None)
    if isinstance(value, reference):
        if Path(value.path).parent.resolve() != target.resolve():
            setattr(sample, FIELD, value.link(path))
        return sample
    # Without a mask vime takes loss from the whole response.
    loss_mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    if value is None and any(loss_mask):
        # The trainer names the sample; a file of nothing would hide it.
        return sample
    spec, tokens = spec_of(args), len(sample.tokens)
    rows = fill_tail(
        held_rows(sample), spec=spec, num_tokens=tokens, loss_mask=loss_mask, sample=sample.index
    )
    written = reference.write(
        # A copy: rows of a response are read-only, and tensors are not.
        import_module("torch").from_numpy(np.array(rows, order="C")),
        path,
        kind=FIELD,
        validated=args.indexer_replay_validate != "off",
    )
    setattr(sample, FIELD, written)
    return sample
