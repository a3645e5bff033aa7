# SPDX-License-Identifier: Apache-2.0
from vime.utils.types import Sample  # noqa: TID251
from vime_replay.integrations.vime import apply_choice, request_parameters

SERVER = None


async def generate(args, sample, sampling_params):
    sampling_params = sampling_params | request_parameters(args, sample)  # replay: one call
    choice = SERVER({"prompt": list(sample.tokens), "sampling_params": sampling_params})
    sample.append_response_tokens(
        args, tokens=choice["token_ids"], log_probs=[0.0] * len(choice["token_ids"])
    )
    aborted = choice["finish_reason"] == "abort"
    sample.status = Sample.Status.ABORTED if aborted else Sample.Status.COMPLETED
    # replay: one call
    apply_choice(args, sample, choice, start=sampling_params.get("indexer_topk_prompt_start", 0))
    return sample
