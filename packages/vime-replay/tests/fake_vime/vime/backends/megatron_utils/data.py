# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import torch


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


# In place of Megatron's parallel state.
PARALLEL = SimpleNamespace(cp_size=1, tp_size=1)


def get_batch(data_iterator, keys, pad_multiplier=128, qkv_format="thd", allgather_cp=False):
    batch = data_iterator.get_next(keys)
    batch["unconcat_tokens"] = batch["tokens"]
    if qkv_format != "thd":
        return batch | {"packed_seq_params": None}
    cp, pad_size = PARALLEL.cp_size, PARALLEL.tp_size * pad_multiplier
    lengths, unit = [len(tokens) for tokens in batch["tokens"]], pad_size
    if allgather_cp:
        unit *= cp
    elif cp > 1:
        lengths = [2 * -(-n // (2 * cp)) for n in lengths]
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    if pad := -borders[-1] % unit:
        borders.append(borders[-1] + pad)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32) * (1 if allgather_cp else cp)
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    return batch | {"packed_seq_params": packed}
