# SPDX-License-Identifier: Apache-2.0
"""Sources: in memory, behind a reference, in files of every format; and files that are not what they say."""

import json
import os
import struct

import numpy as np
import packing
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from vime_replay import store
from vime_replay.errors import ReplayConfigError, ReplayPayloadError
from vime_replay.layout import PackLayout
from vime_replay.pack import pack_rows
from vime_replay.sources import RowSource, as_source

SPEC = packing.spec_of(streams=3, topk=5)
ROWS = packing.random_rows(np.random.default_rng(0), 90, SPEC)
SORTED = np.sort(ROWS.view(np.uint32), axis=2).view(np.int32)


def read(source, rows, streams):
    out = np.full((len(streams), rows.stop - rows.start, source.shape[2]), -9, np.int32)
    source.read_into(out, rows=rows, streams=streams)
    return out


class Reference:
    """What vime's DiskTensorRef looks like: a shape, a dtype, slices that load."""

    dtype, validated = "int32", True

    def __init__(self, rows):
        self._rows, self.shape = rows, rows.shape

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        return self._rows[rows].copy()


def write_file(form, path, rows=ROWS):
    if form == "npy":
        np.save(path, rows)
    elif form == "disk-tensor-ref":
        save_file({"tensor": rows}, path)
    else:
        store.write_rows(path, rows, SPEC, encoding=form)
    return path


FORMS = ["int32", "u16", "set-bitmap-z", "set-delta-z", "npy", "disk-tensor-ref"]


@pytest.mark.parametrize("io", ["pread", "mmap"])
@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_parts(form, io, tmp_path):
    path = tmp_path / "rows"
    if form == "npy":
        path = path.with_suffix(".npy")
    source = store.open_rows(write_file(form, path), SPEC, io=io, root=tmp_path)
    expected = SORTED if form.startswith("set") else ROWS
    assert source.shape == ROWS.shape
    assert isinstance(source, RowSource)
    for rows in (slice(0, 89), slice(17, 40), slice(3, 3)):
        for streams in [(0, 1, 2), (2, 0), (1,)]:
            assert (read(source, rows, streams) == expected[rows][:, list(streams)].transpose(1, 0, 2)).all()
    layout = PackLayout((90,), pad_multiple=8)
    packed, direct = (pack_rows([value], SPEC, layout, streams=[2, 1]) for value in (source, ROWS))
    assert (packed.picks_LSK == direct.picks_LSK).all()
    source.close()
    source.close()


def test_sources_in_memory():
    torch = pytest.importorskip("torch")
    for value in (ROWS, torch.from_numpy(ROWS), ROWS.tolist(), Reference(ROWS), ROWS.astype(np.int64)):
        source = as_source(value)
        assert source.shape == ROWS.shape
        assert (read(source, slice(5, 9), [2, 0]) == ROWS[5:9, [2, 0]].transpose(1, 0, 2)).all()
    assert as_source(Reference(ROWS)).validated
    assert not as_source(ROWS).validated
    source = as_source(ROWS)
    assert as_source(source) is source
    mixed = pack_rows([ROWS, Reference(ROWS)], SPEC, PackLayout((90, 90)))
    assert (mixed.picks_LSK == pack_rows([ROWS, ROWS], SPEC, PackLayout((90, 90))).picks_LSK).all()


@pytest.mark.parametrize(
    "value", [3, ROWS[0], ROWS.astype(np.float32), "rows"], ids=lambda v: type(v).__name__
)
def test_what_holds_no_rows_is_refused(value):
    with pytest.raises(ReplayPayloadError, match="expected"):
        as_source(value)


def test_wide_integers_are_not_cut_to_legal_ones():
    rows = ROWS.astype(np.int64)
    rows[3, 0, 0] += 2**32
    with pytest.raises(ReplayPayloadError, match="expected entries that fit int32"):
        as_source(rows)
    with pytest.raises(ReplayPayloadError, match="expected entries that fit int32"):
        read(as_source(Reference(rows)), slice(0, 9), [0])


def test_a_reference_to_floats_is_refused():
    class Floats(Reference):
        dtype = "torch.bfloat16"

    with pytest.raises(ReplayPayloadError, match="expected an integer dtype, got bfloat16"):
        as_source(Floats(ROWS))


def test_a_reference_that_returns_something_else_is_refused():
    class Short(Reference):
        def __getitem__(self, rows):
            return super().__getitem__(rows)[:-1]

    with pytest.raises(
        ReplayPayloadError, match=r"Short\[5:9\]: expected shape \(4, 3, 5\), got \(3, 3, 5\)"
    ):
        read(as_source(Short(ROWS)), slice(5, 9), [0])


def test_safetensors_reads_our_files(tmp_path):
    path = tmp_path / "rows.safetensors"
    store.write_rows(path, ROWS, SPEC, validated=True, versions=[(0, 7), (40, 8)])
    assert (load_file(path)["topk"] == ROWS.transpose(1, 0, 2)).all()
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert metadata["format"] == store.FORMAT
    assert json.loads(metadata["versions"]) == [[0, 7], [40, 8]]
    source = store.open_rows(path, SPEC)
    assert not source.validated, "a note in a file is no proof of its bytes"
    source.verify()
    assert source.validated
    assert source.metadata == metadata
    source.verify()
    header = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert (8 + header) % store.ALIGNMENT == 0


def test_checksums_find_a_changed_byte(tmp_path):
    path = tmp_path / "rows"
    store.write_rows(path, ROWS, SPEC)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ReplayPayloadError, match="differ from what was written"):
        store.open_rows(path, SPEC).verify()


def test_shared_memory_is_a_mapped_file():
    path = store.SHARED_MEMORY / f"vime-replay-test-{os.getpid()}"
    try:
        store.write_rows(path, ROWS, SPEC)
        one, other = (store.open_rows(path, SPEC, io="mmap") for _ in range(2))
        assert (one.view(slice(0, 89), [0, 1, 2]) == ROWS).all()
        # No copy: a rank packs from pages that its neighbours use too.
        assert not one.view(slice(0, 89), [0, 1, 2]).flags.owndata
        one.close()
        assert (read(other, slice(4, 8), [1]) == ROWS[4:8, [1]].transpose(1, 0, 2)).all()
    finally:
        path.unlink(missing_ok=True)


def test_a_file_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    store.write_rows(path, ROWS, SPEC)
    before = path.read_bytes()

    def fails(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(store.Path, "replace", fails)
    with pytest.raises(OSError, match="no space"):
        store.write_rows(path, ROWS[:5], SPEC)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["rows"]


@pytest.mark.parametrize("device", ["same", "another"])
def test_kept_files_survive_their_rollout(device, tmp_path, monkeypatch):
    rollout = tmp_path / "rollout"
    rollout.mkdir()
    store.write_rows(rollout / "rows", ROWS, SPEC)
    if device == "another":

        def refuses(*_):
            raise OSError("Invalid cross-device link")

        monkeypatch.setattr(os, "link", refuses)
    open_before = store.open_rows(rollout / "rows", SPEC)
    store.keep(rollout / "rows", tmp_path / "kept")
    store.remove(rollout)
    assert not rollout.exists()
    for source in (store.open_rows(tmp_path / "kept", SPEC), open_before):
        assert (read(source, slice(0, 89), [0]) == ROWS[:, :1].transpose(1, 0, 2)).all()


def safetensors_file(**changes):
    entry = {"dtype": "I32", "shape": [3, 89, 5], "data_offsets": [0, ROWS.nbytes]} | changes
    text = json.dumps({"topk": entry}).encode()
    return struct.pack("<Q", len(text)) + text + ROWS.tobytes()


BROKEN = {
    "empty": b"",
    "magic": b"PK\x03\x04" + bytes(60),
    "header-size": struct.pack("<Q", 2**50) + bytes(60),
    "not-json": struct.pack("<Q", 8) + b"\xff" * 60,
    "not-an-object": struct.pack("<Q", 8) + b"[1, 2]  " + bytes(8),
    "two-tensors": struct.pack("<Q", 16) + b'{"a":{}, "b":{}}',
    "dtype": safetensors_file(dtype="F32"),
    "dims": safetensors_file(shape=[3, 445]),
    "negative": safetensors_file(shape=[3, -89, -5]),
    "huge": safetensors_file(shape=[3, 2**62, 5], data_offsets=[0, 15 * 2**64]),
    "offsets": safetensors_file(data_offsets=[4, ROWS.nbytes + 4]),
    "truncated": safetensors_file()[:-4],
    "trailing": safetensors_file() + bytes(4),
    "other-model": safetensors_file(shape=[1, 89, 15]),
    "npy-object": b"\x93NUMPY\x01\x00\x36\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    "npy-version": b"\x93NUMPY\x09\x00" + bytes(60),
}


@pytest.mark.parametrize("io", ["pread", "mmap"])
@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused(case, io, tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(BROKEN[case])
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ReplayPayloadError, match="rows: "):
        store.open_rows(path, SPEC, io=io)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_files_elsewhere_or_missing_are_refused(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    store.write_rows(tmp_path / "rows", ROWS, SPEC)
    (root / "link").symlink_to(tmp_path / "rows")
    for path in (root / "link", root / ".." / "rows"):
        with pytest.raises(ReplayPayloadError, match=r"expected a file in .*root, it leads to"):
            store.open_rows(path, SPEC, root=root)
    with pytest.raises(ReplayPayloadError, match="cannot be opened"):
        store.open_rows(root / "missing", SPEC)
    for io in ("pread", "mmap"):
        with pytest.raises(ReplayPayloadError, match=r"root: cannot be opened \(Is a directory\)"):
            store.open_rows(root, SPEC, io=io)
    with pytest.raises(ReplayConfigError, match="io: expected pread or mmap"):
        store.open_rows(tmp_path / "rows", SPEC, io="aio")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "rows"
    store.write_rows(path, ROWS, SPEC)
    source = store.open_rows(path, SPEC)
    os.truncate(path, path.stat().st_size - 100)
    read(source, slice(0, 9), [0])
    with pytest.raises(ReplayPayloadError, match="stored rows end at byte"):
        read(source, slice(80, 89), [2])
    source.close()
    with pytest.raises(ReplayPayloadError, match="it was closed"):
        read(source, slice(0, 9), [0])


def test_rows_of_another_spec_are_not_written(tmp_path):
    with pytest.raises(
        ReplayConfigError, match=r"expected int32 \[rows, 3, 5\], got int32 of shape \[89, 2, 5\]"
    ):
        store.write_rows(tmp_path / "rows", ROWS[:, :2], SPEC)
    assert not os.listdir(tmp_path)
