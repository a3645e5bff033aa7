# SPDX-License-Identifier: Apache-2.0
"""Which row a program of the Hopper backward takes next.

Rows that are dealt out in advance let programs drift apart, until neighbouring rows, which share keys, no longer run at
the same time, and one program ends last. So the producer takes the next row from a counter, and tells the other roles
through shared memory, a row ahead, as all of them begin with a row before they are through with the last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ONCE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def make_queue():  # type: ignore[no-untyped-def]
    """Two places for a row, with their barriers."""
    next_s = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    next_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    next_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(next_full.index(i), count=1)
        mbarrier.init(next_empty.index(i), count=3)
    return next_s, next_full, next_empty


@gluon.jit
def claim(counter):  # type: ignore[no-untyped-def]
    """A ticket: what the counter was, in the first of 128 threads. Who looks at it waits for it."""
    thread = gl.arange(0, 128, layout=ONCE)
    one = gl.full([128], 1, gl.int32, ONCE)
    # One address for all would make ptxas add up a warp's ones and wait for the result to share it out.
    return gl.atomic_add(counter + thread, one, mask=thread == 0, sem="relaxed")


@gluon.jit
def announce(queue, n, ticket):  # type: ignore[no-untyped-def]
    """The producer: the row that comes behind its n-th, for itself and for the other roles."""
    next_s, next_full, next_empty = queue
    thread = gl.arange(0, 128, layout=ONCE)
    w = gl.num_programs(0) + gl.sum(gl.where(thread == 0, ticket, 0), axis=0)
    mbarrier.wait(next_empty.index(n & 1), ((n >> 1) & 1) ^ 1)
    next_s.index(n & 1).store(gl.full([1], 0, gl.int32, ONCE) + w)
    mbarrier.arrive(next_full.index(n & 1))
    return w


@gluon.jit
def row_behind(queue, n):  # type: ignore[no-untyped-def]
    """The other roles: the row that comes behind the n-th."""
    next_s, next_full, next_empty = queue
    mbarrier.wait(next_full.index(n & 1), (n >> 1) & 1)
    w = gl.max(next_s.index(n & 1).load(ONCE), axis=0)
    mbarrier.arrive(next_empty.index(n & 1))
    return w
