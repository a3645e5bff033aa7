# SPDX-License-Identifier: Apache-2.0
"""How programs of one kernel exchange a few numbers per token, in Gluon.

The programs of a group hold parts of the same tokens' channels and need sums over all of them. Each writes its partial
sums as words of 64 bits, the number below and the tile it belongs to above: a word is written at once, so a reader
that sees the tile's tag has the number, without a flag, a fence or a barrier. Every program waits for its group, so all
must run at the same time: launch with `launch_cooperative_grid=True`. Tiles are counted per group, from 0.

Source: the low-latency protocol of NCCL (arXiv 2507.04786, section on protocols).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A tile is used so many tiles after its partial sums went out: meanwhile those of its group come in.
LAG = gl.constexpr(1)
# Tiles whose words have a place. A program is at most 2 LAG + 1 tiles ahead of what the slowest of its group has read.
SLOTS = gl.constexpr(4)
# Words of a token.
WORDS = gl.constexpr(8)
# Reads a word again until it has the tag.
POLL = gl.constexpr("""{
.reg .pred here;
.reg .b32 number, tag;
mov.b64 $0, $2;
look: mov.b64 {number, tag}, $0;
setp.eq.u32 here, tag, $3;
@here bra done;
ld.relaxed.gpu.global.b64 $0, [$1];
bra look;
done:
}""")


def room(groups: int, splits: int, block_t: int, device: torch.device) -> torch.Tensor:
    """Words without a tag, int64, for groups of `splits` programs and tiles of block_t tokens."""
    return torch.zeros(
        groups * SLOTS.value * splits * block_t * WORDS.value, dtype=torch.int64, device=device
    )


@gluon.jit
def tile_words(words, group, tile, SPLITS: gl.constexpr, BLOCK_T: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where the words of a tile are, [SPLITS, BLOCK_T, WORDS]."""
    return words + (group * SLOTS + tile % SLOTS) * (SPLITS * BLOCK_T * WORDS)


@gluon.jit
def send(word, number, tile):  # type: ignore[no-untyped-def]
    """Writes float32 numbers of a tile."""
    bits = number.to(gl.uint32, bitcast=True).to(gl.int64)
    gl.store(word, bits | ((tile + 1).to(gl.int64) << 32))


@gluon.jit
def receive(word, early, tile):  # type: ignore[no-untyped-def]
    """Float32 numbers of a tile; `early` is what the words were a while ago, read in advance."""
    tag = gl.full(early.shape, 0, gl.int32, early.type.layout) + (tile + 1)
    found = gl.inline_asm_elementwise(
        POLL, "=&l,l,l,r", [word, early, tag], dtype=gl.int64, is_pure=False, pack=1
    )
    return found.to(gl.uint32).to(gl.float32, bitcast=True)
