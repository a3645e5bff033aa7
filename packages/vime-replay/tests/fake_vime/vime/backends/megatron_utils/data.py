# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace


class DataIterator:
    def __init__(self, rollout_data, micro_batch_size=None, micro_batch_indices=None):
        self.rollout_data = rollout_data
        self.micro_batch_size, self.micro_batch_indices = micro_batch_size, micro_batch_indices
        self.offset = 0

    def get_next(self, keys):
        if self.micro_batch_indices is not None:
            rows, step = self.micro_batch_indices[self.offset], 1
        else:
            rows, step = range(self.offset, self.offset + self.micro_batch_size), self.micro_batch_size
        self.offset += step
        values = {key: self.rollout_data.get(key) for key in keys}
        return {key: None if value is None else [value[i] for i in rows] for key, value in values.items()}

    def reset(self):
        self.offset = 0
        return self


def get_batch(data_iterator, keys, pad_multiplier=128, qkv_format="thd", allgather_cp=False):
    batch = data_iterator.get_next(keys)
    batch["unconcat_tokens"] = batch["tokens"]
    batch["packed_seq_params"] = SimpleNamespace(qkv_format="thd") if qkv_format == "thd" else None
    return batch
