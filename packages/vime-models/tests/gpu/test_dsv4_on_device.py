# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 on a CUDA device is the function that it is on the CPU: equal to transformers on the same device."""

from pathlib import Path

import pytest

from vime_convert.tiny import make_tiny
from vime_convert.verify.case import run_case

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("transformers", minversion="5.24", reason="the reference needs transformers >= 5.24")


@pytest.mark.parametrize("name", ["flash", "large-eps"])
def test_equal_to_transformers(name: str, tmp_path: Path) -> None:
    from vime_models.dsv4.plugin import PLUGIN

    PLUGIN.setup("cuda")
    case = next(case for case in PLUGIN.tiny_cases if case.name == name)
    make_tiny(case.config, tmp_path / "hf", seed=1, plugin=PLUGIN)
    result = run_case(PLUGIN, tmp_path / "hf", name=name, seq_len=case.seq_len, device="cuda")
    assert result.ok, [check for check in result.checks if not check.ok]
