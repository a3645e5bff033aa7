# SPDX-License-Identifier: Apache-2.0
"""Orders in which one pipeline rank runs its chunks and microbatches, written from Megatron-LM's description of them.

An event is ("F" or "B", chunk, microbatch).
"""

Event = tuple[str, int, int]


def one_f_one_b(pp: int, rank: int, microbatches: int) -> list[Event]:
    """No interleaving: a few forwards ahead, then one forward and one backward in turn, then the backwards left."""
    ahead = min(pp - rank - 1, microbatches)
    events = [("F", 0, m) for m in range(ahead)]
    for m in range(ahead, microbatches):
        events += [("F", 0, m), ("B", 0, m - ahead)]
    return events + [("B", 0, m) for m in range(microbatches - ahead, microbatches)]


def interleaved(pp: int, vpp: int, rank: int, microbatches: int) -> list[Event]:
    """Groups of `pp` microbatches go through the chunks one after the other; backwards take the chunks in reverse."""
    assert microbatches % pp == 0
    table = [
        (chunk, m)
        for group in range(0, microbatches, pp)
        for chunk in range(vpp)
        for m in range(group, group + pp)
    ]
    total = len(table)
    ahead = total if microbatches == pp else min((pp - rank - 1) * 2 + (vpp - 1) * pp, total)
    forward = [("F", chunk, m) for chunk, m in table]
    backward = [("B", vpp - 1 - chunk, m) for chunk, m in table]
    events = forward[:ahead]
    for k in range(ahead, total):
        events += [forward[k], backward[k - ahead]]
    return events + backward[total - ahead :]


def events_of(pp: int, vpp: int, rank: int, microbatches: int) -> list[Event]:
    """The schedule that Megatron takes for these sizes."""
    return one_f_one_b(pp, rank, microbatches) if vpp == 1 else interleaved(pp, vpp, rank, microbatches)


def layers_of(layers: int, pp: int, vpp: int, rank: int, first: int = 0) -> list[list[int]]:
    """Layers of each chunk of a rank, counted over the model; the first stage has `first` layers fewer."""
    stages = pp * vpp
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    sizes[0], sizes[-1] = sizes[0] - first, sizes[-1] + first
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [list(range(starts[s], starts[s] + sizes[s])) for s in range(rank, stages, pp)]
