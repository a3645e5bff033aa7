# SPDX-License-Identifier: Apache-2.0
from vime_replay.integrations.vime import add_arguments


def get_vime_extra_args_provider(add_custom_arguments=None):
    def add_vime_arguments(parser):
        parser.add_argument("--hf-checkpoint")
        parser.add_argument("--data-pad-size-multiplier", type=int, default=128)
        parser.add_argument("--allgather-cp", action="store_true")
        parser.add_argument("--qkv-format", default="thd")
        parser.add_argument("--recompute-granularity")
        parser.add_argument("--use-rollout-logprobs", action="store_true")
        return add_arguments(parser)  # replay: one call

    return add_vime_arguments
