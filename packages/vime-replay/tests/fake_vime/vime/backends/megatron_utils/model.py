# SPDX-License-Identifier: Apache-2.0
from vime.backends.megatron_utils.data import get_batch  # noqa: TID251


def forward_only(f, args, model, data_iterator, num_microbatches, store_prefix="", batches=get_batch):
    for iterator in data_iterator:
        iterator.reset()
    for _ in range(sum(num_microbatches)):
        for chunk, iterator in zip(model, data_iterator, strict=True):
            chunk(
                batches(
                    iterator, ["tokens"], args.data_pad_size_multiplier, args.qkv_format, args.allgather_cp
                )
            )


def train_one_step(args, rollout_id, step_id, data_iterator, model, num_microbatches, replay):
    batches = replay.with_tickets(get_batch)  # replay: instead of get_batch
    done, layout = [], (args.data_pad_size_multiplier, args.qkv_format, args.allgather_cp)
    # Two microbatches ahead of the first backward, as in a pipeline.
    for number in range(num_microbatches + 2):
        if number < num_microbatches:
            with replay.forward_step():  # replay: around the forward
                done.append([batches(it, ["tokens"], *layout) for it in data_iterator])
                for chunk, batch in zip(model, done[-1], strict=True):
                    chunk(batch)
        if number >= 2 and args.recompute_granularity == "full":
            for chunk, batch in zip(reversed(model), reversed(done[number - 2]), strict=True):
                chunk(batch)
