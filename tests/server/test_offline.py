# SPDX-License-Identifier: Apache-2.0
"""vLLM's offline API returns the picks that the server returns."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from serving import LAYER_IDS, TOPK, Server, environment, incomplete_rows, token_ids

from vime_vllm_patch.client import picks_of

pytestmark = pytest.mark.slow


def test_offline_picks_are_the_servers(
    server: Server, vllm_python: str, checkpoint: Path, tmp_path: Path
) -> None:
    prompt, count = token_ids(300, seed=17), 4
    script = Path(__file__).with_name("offline_picks.py")
    out = tmp_path / "picks.npy"
    command = [vllm_python, str(script), str(checkpoint), json.dumps(prompt), str(count), str(out)]
    done = subprocess.run(command, env=environment(), text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    picks = np.load(out)
    assert picks.shape == (len(prompt) + count - 1, len(LAYER_IDS), TOPK)
    assert incomplete_rows(picks) == []
    (choice,) = server.generate(prompt, max_tokens=count)
    served = picks_of(choice, num_tokens=len(prompt) + count)
    assert served is not None
    # Sets: no order is promised.
    assert np.array_equal(np.sort(picks, axis=-1), np.sort(served, axis=-1))
