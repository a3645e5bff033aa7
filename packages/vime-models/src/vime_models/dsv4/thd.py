# SPDX-License-Identifier: Apache-2.0
"""From Megatron's [s, b, h] or packed [t, 1, h] activations to one packed token axis and back.

Every op of the attention works on T packed tokens with `cu_seqlens`: positions, windows and compression groups
restart at each sequence. A batch of b sequences of length s is the special case cu_seqlens = (0, s, 2s, ...).
Left out: context parallelism, where a rank holds a slice of the packed axis.
"""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vime_kernels.dsa import causal_ranges


@dataclass(frozen=True)
class TokenLayout:
    """Where the sequences are on the packed token axis.

    Attributes:
        cu_seqlens: int32 [B+1], row where each sequence starts, then T; padded lengths if the trainer pads.
        positions: int64 [T], position of each token inside its sequence.
        batch: sequences per microbatch for [s, b, h] input, None for packed input.
    """

    cu_seqlens: torch.Tensor
    positions: torch.Tensor
    batch: int | None

    def pack(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, b, h] to [T, h]: sequences one after the other."""
        return hidden.transpose(0, 1).reshape(-1, hidden.shape[-1])

    def unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, h] back to [s, b, h]."""
        return tokens.view(self.batch or 1, -1, tokens.shape[-1]).transpose(0, 1).contiguous()

    def visible(self, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [T] first and one-past-last compressed entry that each token may see, in rows of all entries."""
        # Explicit rows spare a look at the last entry of cu_seqlens, which is a device round trip.
        rows = torch.arange(self.positions.shape[0], dtype=torch.int32, device=self.cu_seqlens.device)
        return causal_ranges(self.cu_seqlens, ratio=ratio, q_positions=rows)


def token_layout(hidden: torch.Tensor, packed: PackedSeqParams | None) -> TokenLayout:
    """The layout of a microbatch.

    Args:
        hidden: [s, b, h], the whole sequence (after the gather of sequence parallelism).
        packed: Megatron's packing object; only `qkv_format == "thd"` means packed sequences.

    Raises:
        ValueError: packed input with a batch, without `cu_seqlens_q`, or whose last entry is not the token count.
    """
    length, batch = hidden.shape[:2]
    if packed is None or packed.qkv_format != "thd":
        positions = torch.arange(length, device=hidden.device).repeat(batch)
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=hidden.device) * length
        return TokenLayout(cu_seqlens, positions, batch)
    cu_seqlens = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    if batch != 1 or cu_seqlens is None:
        raise ValueError(
            "vime_models.dsv4: expected packed (thd) input as [t, 1, h] with cu_seqlens_q, got shape "
            f"{tuple(hidden.shape)} with cu_seqlens_q={cu_seqlens}"
        )
    # Reading the last entry costs a device round trip, so only the CPU checks it.
    if cu_seqlens.device.type == "cpu" and int(cu_seqlens[-1]) != length:
        raise ValueError(
            f"vime_models.dsv4: expected cu_seqlens to end at the number of tokens ({length}), got "
            f"{int(cu_seqlens[-1])}; give padding tokens a sequence of their own or pad the last sequence"
        )
    cu_seqlens = cu_seqlens.to(device=hidden.device, dtype=torch.int32)
    return TokenLayout(cu_seqlens, local_positions(cu_seqlens, length), None)


def local_positions(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """int64 [length]: rows counted from the start of their own sequence; empty sequences are allowed.

    Args:
        cu_seqlens: int32 [B+1].
        length: number of rows.
    """
    rows = torch.arange(length, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].to(rows.dtype), rows, right=True)
    return rows - cu_seqlens[sequence]
