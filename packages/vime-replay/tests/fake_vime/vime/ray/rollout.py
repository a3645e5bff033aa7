# SPDX-License-Identifier: Apache-2.0
class RolloutManager:
    COLUMNS = (
        "tokens",
        "loss_masks",
        "total_lengths",
        "response_lengths",
        "rollout_indexer_topk",
    )  # replay: the last

    def __init__(self, partitions):
        self.partitions = partitions

    def _convert_samples_to_train_data(self, samples):
        return {
            "tokens": [sample.tokens for sample in samples],
            "loss_masks": [[0] * len(s.loss_mask) if s.remove_sample else s.loss_mask for s in samples],
            "total_lengths": [len(sample.tokens) for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "rollout_indexer_topk": [sample.rollout_indexer_topk for sample in samples],  # replay: one column
        }

    def _split_train_data_by_dp(self, data):
        return [{key: [data[key][i] for i in part] for key in self.COLUMNS} for part in self.partitions]
