# SPDX-License-Identifier: Apache-2.0
"""Requests and starts that are refused, with the reason; the server goes on."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from serving import Server, incomplete_rows, token_ids

from vime_vllm_patch.client import picks_of
from vime_vllm_patch.wire import WireError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "option, expected",
    [
        # The OpenAI endpoints check the sign before the prompt is known.
        (
            {"indexer_topk_prompt_start": -1},
            ("between 0 and the prompt length", "greater than or equal to 0"),
        ),
        ({"indexer_topk_prompt_start": 4000}, ("between 0 and the prompt length",)),
        ({"indexer_topk_prompt_start": "all"}, ("indexer_topk_prompt_start",)),
        ({"return_indexer_topk": "maybe"}, ("return_indexer_topk",)),
    ],
    ids=["negative", "beyond-prompt", "no-number", "no-bool"],
)
@pytest.mark.parametrize("endpoint", ["generate", "completions", "chat"])
def test_bad_option(server: Server, endpoint: str, option: dict[str, Any], expected: tuple[str, ...]) -> None:
    prompt = token_ids(40, seed=3)
    messages = [{"role": "user", "content": " ".join(f"t{token}" for token in prompt)}]
    path, body = {
        "generate": (
            "/inference/v1/generate",
            {"token_ids": prompt, "sampling_params": {"max_tokens": 2, **option}},
        ),
        "completions": ("/v1/completions", {"prompt": prompt, "max_tokens": 2, **option}),
        "chat": ("/v1/chat/completions", {"messages": messages, "max_tokens": 2, **option}),
    }[endpoint]
    status, response = server.post(path, body)
    assert status == 400, response
    assert any(reason in str(response) for reason in expected)
    (choice,) = server.generate(prompt)
    picks = picks_of(choice, num_tokens=46)
    assert picks is not None
    assert incomplete_rows(picks) == []


def test_wrong_model(server: Server) -> None:
    body = {"model": "other", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}
    status, response = server.post("/inference/v1/generate", body)
    assert status == 404
    assert "other" in str(response)


def test_broken_base64_is_refused_by_the_client(server: Server) -> None:
    (choice,) = server.generate(token_ids(40, seed=3))
    broken = choice | {"indexer_topk": "*" + choice["indexer_topk"][1:]}
    with pytest.raises(WireError) as error:
        picks_of(broken, num_tokens=46)
    assert error.value.code == "wire.base64"


def test_without_the_flag(vllm_python: str, checkpoint: Path) -> None:
    """The option is a 400, everything else is as in vLLM without the patch."""
    server = Server(vllm_python, checkpoint, checkpoint.parent / "off.log", "--enable-scale-out")
    try:
        server.wait(600)
        (choice,) = server.generate(token_ids(40, seed=3))
        assert choice["indexer_topk"] is None
        assert choice["routed_experts"] is None
        with pytest.raises(WireError, match="--enable-return-indexer-topk"):
            picks_of(choice, num_tokens=46)
        body = {"token_ids": [5, 6, 7], "sampling_params": {"return_indexer_topk": True}}
        status, response = server.post("/inference/v1/generate", body)
        assert status == 400
        assert "--enable-return-indexer-topk" in str(response)
        server.generate([5, 6, 7])
    finally:
        server.stop()


STARTS = {
    "no-indexer": "hf config has no index_topk",
    "pipeline": "--enable-return-indexer-topk is incompatible with pipeline parallelism",
    "context": "--enable-return-indexer-topk is incompatible with context parallelism",
    "no-prefix-cache": "requires prefix caching",
    "kv-connector": "is incompatible with any KV connector",
    "rust": "unset VLLM_USE_RUST_FRONTEND",
    "rocm": "is incompatible with ROCm",
    "xpu": "is incompatible with XPU",
    "nothing": "accepted",
}
LAYERS = {
    "v3.2": [0, 1, 2, 3],
    "v4": [2, 4],
    "v4.1": [2, 5],
    "frequency": [0, 1, 5, 9],
    "offset": [0, 1, 2, 6, 10],
    "pattern": [0, 3, 6, 9],
    "types-agree": [0, 1],
    "types-disagree": "hf config disagrees with itself",
    "unknown": "it supports deepseek_v32, deepseek_v4, deepseek_v41 and glm_moe_dsa",
    "dense": "hf config has no index_topk",
}
DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 64}
DENSE |= {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}


@pytest.fixture(scope="module")
def answers(vllm_python: str, checkpoint: Path) -> dict[str, Any]:
    """What `start_cases.py` prints in vLLM's environment."""
    dense = checkpoint.parent / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(DENSE))
    script = Path(__file__).with_name("start_cases.py")
    command = [vllm_python, str(script), str(checkpoint), str(dense)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("case", STARTS)
def test_start(answers: dict[str, Any], case: str) -> None:
    assert STARTS[case] in answers["starts"][case]


@pytest.mark.parametrize("case", LAYERS)
def test_layers_that_own_an_indexer(answers: dict[str, Any], case: str) -> None:
    expected, found = LAYERS[case], answers["layers"][case]
    assert found == expected if isinstance(expected, list) else expected in found
