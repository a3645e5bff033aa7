# SPDX-License-Identifier: Apache-2.0
"""What is replayed: how many streams, how wide, which layer reads which stream, and what an entry may be.

A stream is the column block of one layer that runs an indexer of its own. Layers that reuse another layer's picks,
layers without an indexer and draft (MTP) layers own none. Which layers own one is read from the model's
configuration and compared with the list that the server returns, never with its length: two rules may give equally
long lists. Left out: bytes (`vime_vllm_patch.wire`) and values (`rows`).
Sources: configurations of DeepSeek-V3.2 and V4, GLM-5 and GLM-5.2; vLLM's rule for shared indices.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vime_replay.errors import ReplayConfigError

Ints = npt.NDArray[np.int64]
CSA = "compressed_sparse_attention"


@dataclass(frozen=True)
class ReplaySpec:
    """Shape and meaning of the rows of one kind of replay.

    Attributes:
        name: "indexer" or "routing", for messages.
        data_key: key of the rows in rollout data, such as "rollout_indexer_topk".
        num_streams: streams per row on the wire.
        topk: entries per stream.
        stream_of_layer: stream of each layer that has one; layers are counted over the whole model, from 0.
        ratio: tokens per key: 1 if entries are token positions, 4 if they are compressed entries; 0 if they are no
            positions (experts).
        shard_rows_by_tp: the reader sees only its tensor-parallel share of the rows: routers under sequence
            parallelism. Never an indexer, which gathers its input first.
        pad_value: entry of padding rows.
        num_values: number of legal entry values, for ratio 0.

    Raises:
        ReplayConfigError: fields that contradict each other.
    """

    name: str
    data_key: str
    num_streams: int
    topk: int
    stream_of_layer: Mapping[int, int] = field(hash=False)
    ratio: int = 1
    shard_rows_by_tp: bool = False
    pad_value: int = -1
    num_values: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_streams", "topk"):
            if getattr(self, name) < 1:
                raise ReplayConfigError(
                    f"ReplaySpec.{name}: expected at least 1, got {getattr(self, name)}; "
                    "derive the spec from the model's configuration with indexer_spec"
                )
        if self.ratio < 0 or (self.ratio == 0) != (self.num_values is not None):
            raise ReplayConfigError(
                "ReplaySpec: expected ratio >= 1 for positions, or ratio 0 with num_values for anything else, got "
                f"ratio {self.ratio} and num_values {self.num_values}; pass one of the two"
            )
        streams = dict(self.stream_of_layer)
        for layer, stream in streams.items():
            if not 0 <= stream < self.num_streams:
                raise ReplayConfigError(
                    f"replay stream {stream} for layer {layer} is outside the {self.num_streams} recorded streams"
                )
        if len(set(streams.values())) < len(streams):
            raise ReplayConfigError(
                f"ReplaySpec.stream_of_layer: expected one layer per stream, got {streams}; "
                "a layer that reuses another layer's picks owns no stream"
            )
        object.__setattr__(self, "stream_of_layer", streams)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layer of each stream that a layer reads, in stream order."""
        return tuple(sorted(self.stream_of_layer, key=self.stream_of_layer.__getitem__))

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row in int32."""
        return self.num_streams * self.topk * 4

    @property
    def digest(self) -> str:
        """16 hex digits that two specs share if rows of one can be read as rows of the other."""
        streams = sorted(self.stream_of_layer.items())
        facts = [self.name, self.num_streams, self.topk, self.ratio, self.num_values, streams]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def available(self, positions: npt.ArrayLike) -> Ints:
        """int64, keys that queries at `positions` of their sample may pick; the legal entries are those below it."""
        positions = np.asarray(positions, np.int64)
        if self.num_values is not None:
            return np.full_like(positions, self.num_values)
        return (positions + 1) // self.ratio

    def check_layer_ids(self, layer_ids: Iterable[int]) -> None:
        """Compares the layers of the server's streams with those of the model.

        Args:
            layer_ids: `indexer_topk_layer_ids` of the response: layer of each stream, from 0.

        Raises:
            ReplayConfigError: a stream belongs to another layer than the one that would replay it.
        """
        try:
            given = tuple(layer_ids)
        except TypeError as error:
            raise ReplayConfigError(
                f"{self.name} streams: expected indexer_topk_layer_ids to be a list of layers, got {layer_ids!r}; "
                "serve with the patch of this release"
            ) from error
        same_length = len(given) == self.num_streams
        if not same_length or any(given[stream] != layer for layer, stream in self.stream_of_layer.items()):
            raise ReplayConfigError(
                f"{self.name} streams: expected layers {list(self.layer_ids)} in {self.num_streams} streams, the "
                f"server sent layers {list(given)}; serve the checkpoint that the trainer loaded, and the same "
                "index-sharing settings"
            )


def indexer_layers(config: Any) -> tuple[int, ...]:
    """Layers that run an indexer of their own, in ascending order, from 0.

    Args:
        config: a Hugging Face configuration, as an object or a mapping: text part only.

    Raises:
        ReplayConfigError: no indexer in this model, or two fields that disagree.
    """
    get = _getter(config)
    layers, kind = get("num_hidden_layers"), get("model_type")
    if not get("index_topk") or not layers:
        raise ReplayConfigError(
            f"model type {kind!r}: expected index_topk and num_hidden_layers, found neither or one; "
            "only models with an indexer have picks to replay"
        )
    if kind == "deepseek_v4":
        return _csa_layers(get("compress_ratios"), get("layer_types"), layers)
    if kind == "deepseek_v41":
        return _within(get("index_source_layer_ids"), layers, "index_source_layer_ids")
    owners = _sharing(
        get("index_topk_pattern"), get("index_topk_freq"), get("index_skip_topk_offset"), layers
    )
    types = get("indexer_types")
    if types is not None:
        declared = tuple(layer for layer, name in enumerate(types[:layers]) if name == "full")
        if declared != owners:
            raise ReplayConfigError(
                f"indexer_types: expected 'full' at layers {list(owners)}, as index_topk_pattern, index_topk_freq and "
                f"index_skip_topk_offset say, got {list(declared)}; rollout engines read the latter, correct one"
            )
    return owners


def indexer_spec(
    config: Any, *, wire: Literal["compact", "dense"] = "compact", num_streams: int | None = None
) -> ReplaySpec:
    """The spec of a model's indexer picks.

    Args:
        config: as for `indexer_layers`.
        wire: "compact", streams of owning layers only (vLLM); "dense", one stream per layer (SGLang, V3.2 and GLM).
        num_streams: `--rollout-indexer-topk-num-streams`, compared if given.

    Raises:
        ReplayConfigError: as for `indexer_layers`, or `num_streams` differs.
    """
    get, owners = _getter(config), indexer_layers(config)
    dense = wire == "dense"
    streams = get("num_hidden_layers") if dense else len(owners)
    if num_streams not in (None, streams):
        raise ReplayConfigError(
            f"--rollout-indexer-topk-num-streams: expected {streams} for this model, got {num_streams}; "
            f"layers with an indexer are {list(owners)}, leave the flag out"
        )
    ratio = 1
    if get("model_type") in ("deepseek_v4", "deepseek_v41"):
        ratio = (get("compress_rates") or {}).get(CSA, 4)
    return ReplaySpec(
        "indexer",
        "rollout_indexer_topk",
        streams,
        get("index_topk"),
        {layer: layer if dense else stream for stream, layer in enumerate(owners)},
        ratio,
    )


def _getter(config: Any) -> Any:
    return config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)


def _csa_layers(ratios: Any, types: Any, layers: int) -> tuple[int, ...]:
    # Both lists may go on with an entry for draft layers.
    found = []
    if ratios is not None:
        found.append(tuple(layer for layer, ratio in enumerate(ratios[:layers]) if ratio == 4))
    if types is not None:
        found.append(tuple(layer for layer, name in enumerate(types[:layers]) if name == CSA))
    if not found or found[0] != found[-1]:
        raise ReplayConfigError(
            "deepseek_v4: expected compress_ratios or layer_types, or both with the same layers, got layers "
            f"{[list(each) for each in found]}; correct the configuration"
        )
    return _within(found[0], layers, "compress_ratios")


def _sharing(pattern: Any, freq: Any, offset: Any, layers: int) -> tuple[int, ...]:
    if pattern is not None:
        # A layer beyond the end of a short pattern runs its own indexer.
        shared = {layer for layer, letter in enumerate(pattern[:layers]) if letter == "S"}
        return tuple(layer for layer in range(layers) if layer not in shared)
    first = 2 if offset is None else offset
    return tuple(layer for layer in range(layers) if max(layer - first + 1, 0) % (freq or 1) == 0)


def _within(owners: Any, layers: int, name: str) -> tuple[int, ...]:
    ids = tuple(owners or ())
    if not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < layers:
        raise ReplayConfigError(
            f"{name}: expected ascending layers below {layers}, got {list(ids)}; correct the configuration"
        )
    return ids
