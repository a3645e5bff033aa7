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

# Words of a token.
WORDS = gl.constexpr(8)
# Writes a word, relaxed: it carries all that its reader needs, so nothing else has to be in order with it. A place is
# written again only after a word from every reader that could not have been sent before the place was read.
WRITE = gl.constexpr("""{
.reg .b64 word;
mov.b64 word, {$2, $3};
st.relaxed.gpu.global.b64 [$1], word;
mov.b32 $0, 0;
}""")
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


def room(groups: int, slots: int, splits: int, block_t: int, device: torch.device) -> torch.Tensor:
    """Words without a tag, int64, for groups of `splits` programs and tiles of block_t tokens.

    Words of `slots` tiles have a place: more than a program can be ahead of what the slowest of its group has read.
    """
    return torch.zeros(groups * slots * splits * block_t * WORDS.value, dtype=torch.int64, device=device)


@gluon.jit
def axes(ROW: gl.constexpr, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):  # type: ignore[no-untyped-def]
    """The three coordinates of a tensor of that layout."""
    a = gl.arange(0, A, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROW)))[:, None, None]
    b = gl.arange(0, B, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROW)))[None, :, None]
    c = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROW)))[None, None, :]
    return a, b, c


@gluon.jit
def tile_words(words, group, tile, SLOTS: gl.constexpr, SPLITS: gl.constexpr, BLOCK_T: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where the words of a tile are, [SPLITS, BLOCK_T, WORDS]."""
    return words + (group * SLOTS + tile % SLOTS) * (SPLITS * BLOCK_T * WORDS)


@gluon.jit
def send(word, number, tile):  # type: ignore[no-untyped-def]
    """Writes float32 numbers of a tile."""
    tag = gl.full(number.shape, 0, gl.int32, number.type.layout) + (tile + 1)
    gl.inline_asm_elementwise(
        WRITE,
        "=r,l,r,r",
        [word, number.to(gl.uint32, bitcast=True), tag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def receive(word, early, tile):  # type: ignore[no-untyped-def]
    """Float32 numbers of a tile; `early` is what the words were a while ago, read in advance."""
    tag = gl.full(early.shape, 0, gl.int32, early.type.layout) + (tile + 1)
    found = gl.inline_asm_elementwise(
        POLL, "=&l,l,l,r", [word, early, tag], dtype=gl.int64, is_pure=False, pack=1
    )
    return found.to(gl.uint32).to(gl.float32, bitcast=True)
