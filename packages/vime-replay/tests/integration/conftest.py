# SPDX-License-Identifier: Apache-2.0
"""The stand-in for vime on the path, its parsed arguments, and a server."""

import argparse
import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from rollouts import HF, Server  # noqa: E402


@pytest.fixture
def vime(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE.parent / "fake_vime"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vime"]:
        del sys.modules[name]


@pytest.fixture
def parse(vime, tmp_path):
    from vime.utils.arguments import get_vime_extra_args_provider  # noqa: TID251

    from vime_replay.integrations.vime import validate_arguments

    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(HF))

    def make(*words):
        parser = get_vime_extra_args_provider()(argparse.ArgumentParser())
        defaults = [
            "--use-rollout-indexer-replay",
            "--rollout-indexer-topk-store-dir",
            str(tmp_path / "store"),
        ]
        args = parser.parse_args(["--hf-checkpoint", str(tmp_path / "hf"), *defaults, *words])
        validate_arguments(args)
        return args

    return make


@pytest.fixture
def server(parse, monkeypatch):
    from vime_replay.integrations.vime import spec_of

    return Server(spec_of(parse()), monkeypatch)
