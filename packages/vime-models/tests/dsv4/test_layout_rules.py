# SPDX-License-Identifier: Apache-2.0
"""Layouts that would hang, or fail late and far from the cause, are refused when the config is made."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vime_models.dsv4 import validation
from vime_models.dsv4.config import DSv4OptionError, transformer_config
from vime_models.dsv4.context_parallel import ContextParallel
from vime_models.dsv4.tiny import TINY_CASES
from vime_models.host.microbatch import VimePackedSeqParams
from vime_replay.layout import PackLayout

FLASH = TINY_CASES[0].config


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pp": 2}, "--num-layers is 5: .*nearest: --decoder-last-pipeline-num-layers 2, 3 on each other"),
        ({"pp": 4}, "nearest: --decoder-first-pipeline-num-layers 2, 1 on each other stage"),
        ({"pp": 8}, "--num-layers is 5: .*or fewer stages"),
        (
            {"pp": 2, "pipeline_model_parallel_layout": "Et|ttttmL", "mtp_num_layers": 1},
            "--mtp-num-layers is 1: .*leave out --pipeline-model-parallel-layout",
        ),
        ({"pp": 1, "ep": 2, "tp": 2, "etp": 2}, "--expert-tensor-parallel-size is 2: .*over gloo"),
    ],
    ids=["pp2", "pp4", "pp8", "draft-with-layout", "ep2-etp2"],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DSv4OptionError, match=message):
        transformer_config(FLASH, dtype=torch.float32, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"pp": 5},
        {"pp": 2, "num_layers_in_last_pipeline_stage": 2},
        {"pp": 4, "num_layers_in_first_pipeline_stage": 2},
        {"pp": 2, "account_for_embedding_in_pipeline_split": True},
    ],
    ids=["pp5", "pp2-last", "pp4-first", "pp2-with-embedding"],
)
def test_accepted(options: dict[str, Any]) -> None:
    assert transformer_config(FLASH, dtype=torch.float32, **options).num_layers == 5


def test_the_layout_of_another_microbatch_is_named() -> None:
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    given = PackLayout((1024,), cp_size=2, mode="zigzag", query_order="contiguous")
    packed = VimePackedSeqParams(qkv_format="thd", layout=given)
    attention_side = ContextParallel(group, "zigzag", balanced=False, window=128)
    with pytest.raises(
        ValueError, match=r"expected a PackLayout of 512 rows \(256 on each of 2 ranks\), got 1024"
    ):
        attention_side.layout(torch.zeros(256, 1, 8), packed)


def test_two_interleaved_stages_need_separate_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "on_gloo", lambda: False)
    options = {
        "pp": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": "Et|tt|t|tL",
    }
    with pytest.raises(DSv4OptionError, match="--no-overlap-p2p-communication is True: must not be given"):
        transformer_config(FLASH, dtype=torch.float32, **options)
    transformer_config(FLASH, dtype=torch.float32, **options, overlap_p2p_comm=True, batch_p2p_comm=False)
