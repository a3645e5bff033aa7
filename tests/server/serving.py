# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server with a tiny DeepSeek-V4 in a process of its own, and plain HTTP to talk to it."""

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vime_vllm_patch import wire

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    # vLLM's CPU kernels know these sizes only: 512 = 448 + 64, 128, 512 picks, 64 experts and 6 of them.
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 64,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    # Experts by token id: where rounding flips a routing decision, scores move further than rounding moves them.
    "num_hash_layers": 4,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 1024}
    | {"beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 16384,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
LAYER_IDS = [1, 3]
TOPK, RATIO = 512, 4
# Contexts up to this many tokens have no more entries than picks, so every entry is picked.
SELECT_ALL = RATIO * (TOPK + 1) - 1
MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, BLOCK = 4096, 1024, 256


def token_ids(count: int, seed: int) -> list[int]:
    """Prompt of `count` tokens that are neither begin nor end of text."""
    return np.random.default_rng(seed).integers(2, CONFIG["vocab_size"], count).tolist()


def write_tokenizer(directory: Path) -> None:
    """A tokenizer beside the checkpoint in which token i is the word `ti`, with the plainest chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{i}": i for i in range(CONFIG["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "t0",
        "eos_token": "t1",
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def incomplete_rows(picks_RLK: np.ndarray, prompt_start: int = 0) -> list[int]:
    """Rows without exactly min(K, visible entries) distinct entries, all of them visible; -1 elsewhere."""
    bad = []
    for row, picks_LK in enumerate(picks_RLK):
        visible = (row + prompt_start + 1) // RATIO
        for picks in picks_LK:
            entries = np.unique(picks[picks != wire.UNUSED])
            whole = len(entries) == (picks != wire.UNUSED).sum() == min(TOPK, visible)
            if not whole or (len(entries) and not 0 <= entries[0] <= entries[-1] < visible):
                bad.append(row)
    return bad


def environment() -> dict[str, str]:
    """Environment variables of a process that runs vLLM on the CPU."""
    ours = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    settings = {"TRITON_INTERPRET": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"OMP_NUM_THREADS": "2", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    return ours | settings


class Server:
    """A running server.

    Args:
        python: interpreter of vLLM's environment.
        checkpoint: directory with the tokenizer.
        log: file that receives what the server prints.
        flags: further command line words.
    """

    def __init__(self, python: str, checkpoint: Path, log: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "bfloat16", "--enforce-eager", "--distributed-executor-backend", "uni"]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "4"]
        command += ["--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS), *flags]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment()
            )

    def wait(self, seconds: float) -> None:
        """Returns when the server answers; raises with the end of its log if it stops or takes too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(self._url("/health"), timeout=5):
                return
            time.sleep(0.5)
        state = f"exit status {self.process.poll()}" if self.process.poll() is not None else "no answer"
        raise RuntimeError(f"vLLM server: {state} within {seconds:.0f} s; {self.log}:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Ends the process and waits for it."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def open(self, path: str, body: Mapping[str, Any], timeout: float = 600) -> Any:
        """The open response of one POST."""
        data = json.dumps({"model": "tiny", **body}).encode()
        request = urllib.request.Request(self._url(path), data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=timeout)

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one POST."""
        try:
            with self.open(path, body) as response:
                return response.status, json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def generate(self, prompt: list[int], *, max_tokens: int = 6, **sampling: Any) -> list[dict[str, Any]]:
        """Choices of /inference/v1/generate, greedy unless told otherwise."""
        choices: list[dict[str, Any]] = self._generate(prompt, max_tokens=max_tokens, **sampling)["choices"]
        return choices

    def generate_with_prompt_logprobs(self, prompt: list[int]) -> tuple[list[dict[str, Any]], list[float]]:
        """Choices with one token, and the log probability of every prompt token but the first."""
        response = self._generate(prompt, max_tokens=1, prompt_logprobs=0)
        pairs = zip(prompt[1:], response["prompt_logprobs"][1:], strict=True)
        return response["choices"], [found[str(token)]["logprob"] for token, found in pairs]

    def _generate(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        params = {"temperature": 0, "ignore_eos": True, **sampling}
        status, body = self.post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": params})
        assert status == 200, body
        return body

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The choices of a streamed answer, chunk by chunk."""
        with self.open(path, {**body, "stream": True}) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield from json.loads(line[6:])["choices"]
