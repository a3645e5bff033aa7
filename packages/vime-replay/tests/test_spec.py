# SPDX-License-Identifier: Apache-2.0
"""Which layers own a stream, for every family of models, and specs that are refused."""

import pickle

import numpy as np
import pytest

from vime_replay.errors import ReplayConfigError, ReplayDecodeError
from vime_replay.spec import ReplaySpec, indexer_layers, indexer_spec

V4_FLASH = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "index_topk": 512,
    # One entry more than layers: the draft layer's.
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
V4_PRO = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 61,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}
V32 = {"model_type": "deepseek_v32", "num_hidden_layers": 61, "index_topk": 2048}
GLM52 = {"model_type": "glm_moe_dsa", "num_hidden_layers": 78, "index_topk": 2048, "index_topk_freq": 4}


@pytest.mark.parametrize(
    "config, count, first, last, ratio",
    [
        (V4_FLASH, 21, [2, 4, 6], 42, 4),
        (V4_PRO, 30, [2, 4, 6], 60, 4),
        # A draft layer with an indexer has no stream either.
        (V4_FLASH | {"compress_ratios": [*V4_FLASH["compress_ratios"][:-1], 4]}, 21, [2, 4, 6], 42, 4),
        (V32, 61, [0, 1, 2], 60, 1),
        (GLM52, 21, [0, 1, 5], 77, 1),
        # The other offset that is in use has as many layers; only the lists tell them apart.
        (GLM52 | {"index_skip_topk_offset": 3}, 21, [0, 1, 2], 74, 1),
        (GLM52 | {"index_topk_pattern": "FFS" + "S" * 70}, 7, [0, 1, 73], 77, 1),
        (
            {
                "model_type": "deepseek_v41",
                "num_hidden_layers": 9,
                "index_topk": 8,
                "index_source_layer_ids": [1, 4],
            },
            2,
            [1, 4],
            4,
            4,
        ),
    ],
    ids=["v4-flash", "v4-pro", "draft", "v3.2", "glm-5.2", "glm-offset-3", "pattern", "v4.1"],
)
def test_layers_that_own_a_stream(config, count, first, last, ratio):
    spec = indexer_spec(config, num_streams=count)
    assert spec.layer_ids == indexer_layers(config)
    assert (spec.num_streams, spec.ratio, spec.topk) == (count, ratio, config["index_topk"])
    assert list(spec.layer_ids[: len(first)]) == first
    assert spec.layer_ids[-1] == last
    assert [spec.stream_of_layer[layer] for layer in first] == list(range(len(first)))


def test_configuration_objects_and_layer_types():
    class Config:
        model_type, num_hidden_layers, index_topk = "deepseek_v4", 3, 4
        layer_types = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
        compress_rates = {"compressed_sparse_attention": 4}  # noqa: RUF012

    assert indexer_layers(Config()) == (1,)
    assert indexer_spec(Config()).ratio == 4


def test_a_dense_wire_has_a_stream_per_layer():
    spec = indexer_spec(GLM52, wire="dense")
    assert spec.num_streams == 78
    assert spec.stream_of_layer[77] == 77
    spec.check_layer_ids(range(78))


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "qwen3", "num_hidden_layers": 2}, "expected index_topk and num_hidden_layers"),
        (V4_FLASH | {"compress_ratios": [0] * 43}, "compress_ratios: expected ascending layers below 43"),
        (V4_FLASH | {"layer_types": ["sliding_attention"] * 43}, "both with the same layers"),
        (V4_FLASH | {"compress_ratios": None}, "expected compress_ratios or layer_types"),
        (GLM52 | {"indexer_types": ["full"] * 78}, "indexer_types: expected 'full' at layers [0, 1, 5"),
        (
            {
                "model_type": "deepseek_v41",
                "num_hidden_layers": 3,
                "index_topk": 8,
                "index_source_layer_ids": [3],
            },
            "below 3",
        ),
    ],
    ids=["no-indexer", "no-layer", "disagree", "neither", "indexer-types", "outside"],
)
def test_configurations_that_contradict_themselves_are_refused(config, message):
    with pytest.raises(ReplayConfigError) as error:
        indexer_layers(config)
    assert message in str(error.value)


def test_the_flag_is_compared_with_the_model():
    with pytest.raises(ReplayConfigError, match="num-streams: expected 21 for this model, got 43"):
        indexer_spec(V4_FLASH, num_streams=43)


def test_lists_of_layers_are_compared_not_their_lengths():
    spec = indexer_spec(GLM52)
    spec.check_layer_ids(indexer_layers(GLM52))
    other = indexer_layers(GLM52 | {"index_skip_topk_offset": 3})
    assert len(other) == len(spec.layer_ids)
    for wrong in (other, spec.layer_ids[:-1], [*spec.layer_ids, 80]):
        with pytest.raises(ReplayConfigError, match="serve the checkpoint that the trainer loaded"):
            spec.check_layer_ids(wrong)
    with pytest.raises(
        ReplayConfigError, match="expected indexer_topk_layer_ids to be a list of layers, got 5"
    ):
        spec.check_layer_ids(5)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_streams": 0}, "num_streams: expected at least 1, got 0"),
        ({"topk": 0}, "topk: expected at least 1, got 0"),
        (
            {"stream_of_layer": {5: 2}},
            "replay stream 2 for layer 5 is outside the 2 recorded streams",
        ),
        ({"stream_of_layer": {5: -1}}, "replay stream -1 for layer 5"),
        ({"stream_of_layer": {4: 1, 5: 1}}, "expected one layer per stream"),
        ({"ratio": 0}, "ratio 0 with num_values for anything else"),
        ({"num_values": 4}, "ratio 0 with num_values for anything else"),
    ],
    ids=["streams", "topk", "outside", "negative", "shared", "no-values", "both"],
)
def test_specs_that_contradict_themselves_are_refused(fields, message):
    with pytest.raises(ReplayConfigError) as error:
        ReplaySpec(
            **{
                "name": "indexer",
                "data_key": "k",
                "num_streams": 2,
                "topk": 4,
                "stream_of_layer": {0: 0},
                **fields,
            }
        )
    assert message in str(error.value)


def test_keys_that_a_query_may_see():
    positions = np.arange(9)
    assert indexer_spec(V32).available(positions).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert indexer_spec(V4_FLASH).available(positions).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    routing = ReplaySpec("routing", "k", 1, 2, {0: 0}, ratio=0, num_values=16)
    assert routing.available(positions).tolist() == [16] * 9


def test_digests_tell_specs_apart_and_errors_cross_processes():
    digests = {indexer_spec(c).digest for c in (V4_FLASH, V4_PRO, V32, GLM52)}
    assert len(digests) == 4
    assert indexer_spec(V32).digest == indexer_spec(dict(V32)).digest
    error = pickle.loads(pickle.dumps(ReplayDecodeError("shape.rows", 3, "why")))
    assert (error.code, error.sample, str(error)) == (
        "shape.rows",
        3,
        "vime_replay [shape.rows] sample 3: why",
    )
