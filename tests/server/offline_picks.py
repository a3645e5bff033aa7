# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: TID251 - runs inside vLLM only
"""Writes the picks of one prompt by vLLM's offline API to a .npy file.

Arguments: a checkpoint, the prompt's token ids as JSON, the number of tokens to sample, the file.
"""

import json
import sys

import numpy as np
from vllm import LLM, SamplingParams


def main() -> None:
    """Runs the prompt once."""
    checkpoint, prompt, count, out = sys.argv[1:]
    model = LLM(
        checkpoint,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        distributed_executor_backend="uni",
        enable_return_indexer_topk=True,
    )
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=int(count))
    (answer,) = model.generate([{"prompt_token_ids": json.loads(prompt)}], sampling)
    np.save(out, np.asarray(answer.outputs[0].indexer_topk))


# The engine may start processes that import this file.
if __name__ == "__main__":
    main()
