# SPDX-License-Identifier: Apache-2.0
"""A million broken blobs and a thousand built ones: no crash, nothing accepted that numpy reads otherwise, no bomb.

Run by `nox -s fuzz`. Each case is repeatable from its seed.
"""

import base64
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import COMPRESSED, SPEC, encoded_target, mutate, wire_target

from vime_replay.errors import ReplayDecodeError
from vime_replay.rows import decode_rows

pytestmark = pytest.mark.slow

TARGETS = {
    "npy": (wire_target(SPEC, 9), 500_000),
    "npy-compressed": (wire_target(COMPRESSED, 25), 150_000),
    "raw": (wire_target(SPEC, 9, raw=True), 100_000),
    "u16": (encoded_target("u16"), 50_000),
    "set-bitmap-z": (encoded_target("set-bitmap-z"), 100_000),
    "set-delta-z": (encoded_target("set-delta-z"), 100_000),
}
PARTS = 10
# Peak memory is measured on every so many mutations, because measuring is slow.
MEASURED = 20
OVERHEAD = 1 << 20


def test_the_counts_are_a_million():
    assert sum(count for _, count in TARGETS.values()) == 10**6
    for target, _ in TARGETS.values():
        for blob in target.blobs:
            assert len(blob) < 4096
            assert target.oracle(blob) is not None
            target.read(blob)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", TARGETS)
def test_mutations(name, part):
    target, total = TARGETS[name]
    rng = random.Random(f"{name} {part}")
    accepted = 0
    for number in range(total // PARTS):
        under = "z" not in name and name != "u16" and rng.random() < 0.6
        blob = mutate(rng.choice(target.blobs), rng, under_base64=under)
        measured = number % MEASURED == 0
        if measured:
            tracemalloc.start()
        try:
            found = target.read(blob)
        except target.refusals:
            continue
        finally:
            if measured:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak <= len(blob) + target.decoded + OVERHEAD, blob
        accepted += 1
        expected = target.oracle(blob)
        assert expected is not None, blob
        assert found.shape == expected.shape, blob
        assert (found == expected).all(), blob
    # Some changes hit spaces of a header, or replace an entry by another legal one.
    assert accepted > 0


DESCR = st.sampled_from(
    ["<i4", ">i4", "|i4", "=i4", "i4", "<i8", "<u2", "<f4", "|O", "|V4", "<i4 ", "int32", ""]
) | st.text(max_size=6)
DIMENSION = st.sampled_from([8, 2, 4, 0, 1, 7, 9, -1, 2**31, 2**62, 2**63 + 8, True, 8.0, None, "8"])
SHAPE = st.sampled_from([(8, 2, 4)]) | st.lists(DIMENSION, max_size=4).map(tuple)


@st.composite
def headers(draw):
    fields = {
        "descr": draw(st.sampled_from(["<i4"]) | DESCR),
        "fortran_order": draw(st.sampled_from([False, False, True, 0, None, "False"])),
        "shape": draw(SHAPE),
    }
    for key in draw(st.lists(st.sampled_from(list(fields)), max_size=1)):
        del fields[key]
    if draw(st.booleans()) and draw(st.booleans()):
        fields["extra"] = draw(st.integers())
    return fields


@settings(max_examples=1000, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    fields=headers(),
    version=st.sampled_from([(1, 0), (1, 0), (2, 0), (3, 0), (1, 1), (0, 0), (9, 9)]),
    data=st.sampled_from([64 * 4] * 3 + [0, 4, 64 * 4 - 1, 64 * 4 + 4, 64 * 8, 3000]),
    pad=st.sampled_from([64, 64, 16, 1]),
    value=st.integers(-(2**31), 2**31 - 1) | st.sampled_from([-1, 0, 3]),
    row=st.integers(0, 7),
)
def test_built_headers(fields, version, data, pad, value, row):
    """A payload is accepted if and only if each of its parts is what the wire says, and the entry is legal."""
    text = repr(fields).encode("latin-1", "replace")
    wide = 2 if version[0] == 1 else 4
    text += b" " * (-(8 + wide + len(text) + 1) % pad) + b"\n"
    rows = np.full((8, 2, 4), -1, np.int32)
    rows[:, :, 0] = np.arange(8)[:, None]
    rows[row, 1, 0] = value
    body = (rows.tobytes() * 12)[:data]
    start = b"\x93NUMPY" + bytes(version) + len(text).to_bytes(wide, "little") + text
    payload = base64.b64encode(start + body)
    good = (
        fields.keys() == {"descr", "fortran_order", "shape"}
        and fields["descr"] == "<i4"
        and fields["fortran_order"] is False
        and fields["shape"] == (8, 2, 4)
        and all(type(n) is int for n in fields["shape"])
        and version in ((1, 0), (2, 0), (3, 0))
        and data == 64 * 4
        and len(start) % 16 == 0
        and 0 <= value <= row
    )
    try:
        found = decode_rows(payload, SPEC, num_tokens=9)
    except ReplayDecodeError:
        assert not good, fields
    else:
        assert good, fields
        assert (found == rows).all()
