# SPDX-License-Identifier: Apache-2.0
"""Output appears complete or not at all: refusals, failures half-way, a killed process, a full disk."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_convert.errors import OutputError
from vime_convert.output import staged
from vime_convert.reader import CheckpointReader, read_json
from vime_convert.writer import write_checkpoint


def three() -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((f"t{i}", torch.full((10,), float(i))) for i in range(3))


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("shard_bytes", [1, 80, 1000], ids=["each-alone", "two-and-one", "one-file"])
def test_sharding(tmp_path: Path, shard_bytes: int, load_tensors: Callable[[Path], Any]) -> None:
    assert write_checkpoint(tmp_path / "out", three(), {"a": 1}, shard_bytes=shard_bytes) == 3
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = {1: 3, 80: 2, 1000: 1}[shard_bytes]
    assert len(files) == count
    assert files[-1] == (
        "model.safetensors" if count == 1 else f"model-{count:05d}-of-{count:05d}.safetensors"
    )
    assert CheckpointReader(tmp_path / "out").raw_names() == ["t0", "t1", "t2"]
    assert all(t.equal(torch.full((10,), float(n[1]))) for n, t in load_tensors(tmp_path / "out").items())
    assert read_json(tmp_path / "out" / "config.json") == {"a": 1, "dtype": "float32"}
    assert names(tmp_path) == {"out"}


def test_config_dtype_follows_the_weights(tmp_path: Path) -> None:
    items = [("a", torch.ones(9).bfloat16()), ("b", torch.ones(2)), ("c", torch.ones(90, dtype=torch.int64))]
    write_checkpoint(tmp_path / "out", items, {"torch_dtype": "float32"})
    assert read_json(tmp_path / "out" / "config.json") == {"torch_dtype": "bfloat16"}


def test_companions_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "x.bin"):
        (source / name).write_text(name)
    write_checkpoint(tmp_path / "out", three(), {}, companions_of=source)
    assert names(tmp_path / "out") == {
        *("tokenizer.json", "tokenizer_config.json", "generation_config.json"),
        *("config.json", "model.safetensors"),
    }
    assert read_json(tmp_path / "out" / "config.json") == {"dtype": "float32"}


def test_existing_output_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_checkpoint(tmp_path / "out", three(), {})  # an empty directory may be filled
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(OutputError, match="out: expected a path that does not exist yet"):
        write_checkpoint(tmp_path / "out", iter(()), {})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="file: expected a path that does not exist yet"):
        write_checkpoint(tmp_path / "file", three(), {})
    assert names(tmp_path) == {"out", "file"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError], ids=lambda e: e.__name__)
def test_nothing_is_left_after_a_failure(tmp_path: Path, error: type[BaseException]) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from three()
        raise error

    with pytest.raises(error):
        write_checkpoint(tmp_path / "out", failing(), {}, shard_bytes=1)
    assert names(tmp_path) == set()


def test_one_name_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="t0 comes twice"):
        write_checkpoint(tmp_path / "out", [*three(), *three()], {})
    assert names(tmp_path) == set()


def test_full_disk_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(10**9, 10**9 - 100, 100))
    asked = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        asked.append(True)
        yield from three()

    with pytest.raises(OutputError, match=r"needs 5.0 GB, 0.0 GB are free .*choose another path"):
        write_checkpoint(tmp_path / "out", watched(), {}, total_bytes=5 * 10**9)
    assert not asked
    assert names(tmp_path) == set()


def test_two_writers_of_one_target(tmp_path: Path) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with staged(tmp_path / "out") as directory:
            (directory / "first").touch()
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)
    with pytest.raises(OutputError, match="another process is writing it"), staged(tmp_path / "out"):
        pass
    leave.set()
    thread.join()
    assert names(tmp_path / "out") == {"first"}
    assert names(tmp_path) == {"out"}


def test_killed_half_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = """
        import sys, time, torch
        from vime_convert.writer import write_checkpoint
        def tensors():
            yield "a", torch.ones(10)
            yield "b", torch.ones(10)
            print("half", flush=True)
            time.sleep(60)
        write_checkpoint(sys.argv[1], tensors(), {}, shard_bytes=1)
    """
    target = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(target)],
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not target.exists()
    assert names(tmp_path) == {".out.partial", ".out.lock"}
    write_checkpoint(target, three(), {})
    assert "removing what an interrupted run left behind" in caplog.text
    assert CheckpointReader(target).raw_names() == ["t0", "t1", "t2"]
    assert names(tmp_path) == {"out"}


def test_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("link", "dangling"):
        with pytest.raises(OutputError, match=f"{name}: expected a path that is no symbolic link; pass .*/"):
            write_checkpoint(tmp_path / name, three(), {})
    assert names(tmp_path) == {"real", "link", "dangling"}
    assert names(tmp_path / "real") == set()


def test_unusable_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "file" / "out", tmp_path / "file" / "deeper" / "out"):
        with pytest.raises(OutputError, match=r"out: .*/file is not a directory; choose another path"):
            write_checkpoint(target, three(), {})
    # The tests may run as root, whom permissions do not stop.
    monkeypatch.setattr("os.access", lambda path, _mode: path != tmp_path)
    with pytest.raises(OutputError, match=r"new/out: .* cannot be written to; choose another path"):
        write_checkpoint(tmp_path / "new" / "out", three(), {})
    assert names(tmp_path) == {"file"}
