# SPDX-License-Identifier: Apache-2.0
"""From a response's choice to a checked array of picks, and from turn to turn of one conversation.

A request asks for the rows it does not hold: with N tokens so far, all N - 1 rows held, and a new prompt that begins
with those N tokens, it sends `indexer_topk_prompt_start = N - 1` (not N: the last sampled token had no row yet; this
request forwards it). The answer is appended at that row.

    picks = Picks(layer_ids=[2, 4, 6], topk=512)
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 64, **picks.request(len(prompt))}}
    choice = post("/inference/v1/generate", body)["choices"][0]
    picks.add(choice, len(prompt) + len(choice["token_ids"]))

`/v1/completions` and `/v1/chat/completions` take the same options at the top level of the body. Left out: sending
requests, what values a row may hold, replacing missing rows (vime_replay). Source: the rules of vLLM's routed experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vime_vllm_patch import wire
from vime_vllm_patch.wire import WireError


def picks_of(
    choice: Mapping[str, Any],
    *,
    num_tokens: int,
    prompt_start: int = 0,
    layer_ids: Sequence[int] | None = None,
    topk: int | None = None,
    max_bytes: int = wire.MAX_BYTES,
) -> wire.Picks | None:
    """The array of one choice, int32 [num_tokens - 1 - prompt_start, L, K]; None if the request ended before it ran.

    Args:
        choice: an element of `choices` of generate, completions or chat; when streaming, of the last chunk.
        num_tokens: prompt and output tokens that the choice stands for.
        prompt_start: the request's `indexer_topk_prompt_start`.
        layer_ids: layers of the model that own an indexer, ascending. None accepts any.
        topk: the model's `index_topk`. None accepts any.
        max_bytes: largest decoded size.

    Raises:
        WireError: the payload is refused, or the server has no channel (client.missing), did not capture this request
            (client.null), or captured other layers (client.layers).
    """
    if wire.FIELD not in choice:
        advice = "patch it (vime-vllm-patch apply) and start it with --enable-return-indexer-topk"
        raise WireError(
            "client.missing", f"the choice has no such field, so the server is not patched; {advice}"
        )
    payload = choice[wire.FIELD]
    if payload is None:
        if choice.get("finish_reason") == "abort":
            return None
        advice = (
            f"start the server with --enable-return-indexer-topk, and do not send {wire.OPT_OUT_OPTION}=false"
        )
        raise WireError("client.null", f"expected a payload, got null; {advice}")
    found = choice.get(wire.LAYER_IDS_FIELD)
    if layer_ids is not None and found is not None and list(found) != list(layer_ids):
        detail = f"server captured layers {list(found)}, the model's indexers are in {list(layer_ids)}"
        raise WireError("client.layers", f"{detail}; is it the same checkpoint?")
    streams = None if layer_ids is None else len(layer_ids)
    rows = num_tokens - 1 - prompt_start
    return wire.decode(payload, rows=rows, streams=streams, topk=topk, max_bytes=max_bytes)


class Picks:
    """The picks of one conversation, over all its requests.

    Args:
        layer_ids: as in `picks_of`; None takes the first answer's number of streams.
        topk: as in `picks_of`; None takes the first answer's.
        max_bytes: largest decoded size of one answer.
    """

    def __init__(
        self,
        *,
        layer_ids: Sequence[int] | None = None,
        topk: int | None = None,
        max_bytes: int = wire.MAX_BYTES,
    ) -> None:
        self._layer_ids = layer_ids
        self._topk = topk
        self._max_bytes = max_bytes
        self._start = 0
        self._held = 0
        self._parts: list[wire.Picks] = []

    @property
    def held(self) -> int:
        """Rows so far."""
        return self._held

    @property
    def array(self) -> wire.Picks:
        """All rows, int32 [held, L, K]; read-only."""
        if len(self._parts) != 1:
            if not self._parts:
                raise WireError("client.empty", "expected rows, none were received; add a choice first")
            joined = np.concatenate(self._parts)
            joined.flags.writeable = False
            self._parts = [joined]
        return self._parts[0]

    def request(self, prompt_tokens: int) -> dict[str, int]:
        """Options of the next request, which leave out the rows held.

        Args:
            prompt_tokens: tokens of its prompt, which begins with the tokens of the rows held.
        """
        # After a strip the next prompt may be shorter than what is held; the server refuses a start past it.
        self._start = min(self._held, prompt_tokens)
        return {wire.PROMPT_START_OPTION: self._start}

    def add(self, choice: Mapping[str, Any], num_tokens: int) -> None:
        """Appends the answer to the last `request`; one that was aborted before it ran changes nothing.

        Args:
            choice: as in `picks_of`.
            num_tokens: prompt and output tokens of this request.

        Raises:
            WireError: as `picks_of`; what is held stays as it was.
        """
        new = picks_of(
            choice,
            num_tokens=num_tokens,
            prompt_start=self._start,
            layer_ids=self._layer_ids,
            topk=self._topk,
            max_bytes=self._max_bytes,
        )
        if new is None:
            return
        if self._parts and self._parts[0].shape[1:] != new.shape[1:]:
            detail = f"expected {self._parts[0].shape[1:]} streams and picks as before, got {new.shape[1:]}"
            raise WireError("shape.streams", f"{detail}; did the server change its model?")
        if self._start < self._held:
            self._keep(self._start)
        self._parts.append(new)
        self._held += len(new)

    def strip(self, count: int) -> None:
        """Drops the rows of `count` output tokens that the client cut off the end.

        Raises:
            WireError: fewer rows are held.
        """
        if not 0 <= count <= self._held:
            detail = f"cannot drop {count} of {self._held} rows"
            raise WireError("client.strip", f"{detail}; drop as many as the tokens you removed")
        if count:
            self._keep(self._held - count)

    def _keep(self, rows: int) -> None:
        self._parts = [self.array[:rows]]
        self._held = rows
