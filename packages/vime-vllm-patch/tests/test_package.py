# SPDX-License-Identifier: Apache-2.0
"""The package installs, imports alone and states its version."""

from importlib.metadata import version

import vime_vllm_patch


def test_version_matches_the_metadata() -> None:
    assert vime_vllm_patch.__version__ == version("vime-vllm-patch")
