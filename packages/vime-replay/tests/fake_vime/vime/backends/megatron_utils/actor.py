# SPDX-License-Identifier: Apache-2.0
from vime.backends.megatron_utils.data import DataIterator, get_batch  # noqa: TID251
from vime.backends.megatron_utils.model import forward_only, train_one_step  # noqa: TID251
from vime_replay.integrations.vime import fill_indexer_replay


class MegatronTrainRayActor:
    def __init__(self, args, model, indexer_replay):
        self.args, self.model, self.indexer_replay = args, model, indexer_replay

    def fill_routing_replay(self, data_iterator, num_microbatches, rollout_data):
        raise AssertionError("not used here")

    def train_actor(self, rollout_id, rollout_data, external_data=None):
        indices, num_microbatches = rollout_data["micro_batch_indices"], rollout_data["num_microbatches"]
        iterators = [DataIterator(rollout_data, micro_batch_indices=indices) for _ in self.model]
        replay = self.indexer_replay
        if self.args.use_rollout_indexer_replay:
            fill_indexer_replay(self, iterators, num_microbatches, rollout_data)  # replay: one call
        replay.set_stage("fallthrough")
        forward_only(None, self.args, self.model, iterators, num_microbatches, store_prefix="ref_")
        replay.set_stage("replay_forward")
        replay.begin_lazy_pass("forward")
        forward_only(
            None, self.args, self.model, iterators, num_microbatches, batches=replay.with_tickets(get_batch)
        )
        replay.clear_all_forward()
        replay.set_stage("replay_backward")
        replay.begin_lazy_pass("backward")
        for iterator in iterators:
            iterator.reset()
        for step_id, count in enumerate(num_microbatches):
            train_one_step(self.args, rollout_id, step_id, iterators, self.model, count, replay)
        replay.assert_all_consumed("all" if self.args.recompute_granularity == "full" else "none")
        replay.clear_all()
