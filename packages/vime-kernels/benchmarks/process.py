# SPDX-License-Identifier: Apache-2.0
"""The processes that measure: one per peer and share of the cases, started by the command and heard line by line."""

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MARK = "@@"  # in front of what a child says to its parent


@dataclass(frozen=True)
class Wanted:
    """A word of the command line: NAME[@DEVICE][=PATH:PATH]."""

    name: str
    device: str
    paths: list[str]

    @classmethod
    def parse(cls, word: str) -> "Wanted":
        """What the word says; the first device where it names none."""
        label, _, paths = word.partition("=")
        name, _, device = label.partition("@")
        return cls(name, device or "0", [path for path in paths.split(":") if path])


def say(message: dict[str, Any]) -> None:
    """One message to the parent."""
    print(f"{MARK}{json.dumps(message)}", flush=True)


class Child:
    """A process that measures one peer on its share of the cases."""

    def __init__(self, word: str, share: str, options: argparse.Namespace) -> None:
        self.wanted = Wanted.parse(word)
        self.label = f"{self.wanted.name} {share}"
        folders = [path for path in self.wanted.paths if not path.endswith(".so")]
        environment = os.environ | {
            "PYTHONPATH": ":".join([*folders, os.environ.get("PYTHONPATH", "")]).strip(":")
        }
        if options.device == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            devices = visible.split(",") if visible else []
            place = int(self.wanted.device)
            environment["CUDA_VISIBLE_DEVICES"] = devices[place] if devices else self.wanted.device
        command = [sys.executable, *sys.argv, "--child", f"{share}/{word}"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith(MARK):
                self.said.put(json.loads(text[len(MARK) :]))
            elif text.startswith(("absent", "left out", "miles:")):
                print(f"{self.label}: {text.rstrip()}", flush=True)
        self.said.put(None)

    def until(self, word: str, deadline: float) -> dict[str, Any] | None:
        """The next message with this word; None when the process ended or the time is up."""
        while not self.ended:
            try:
                message = self.said.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                print(f"{self.label}: out of time", flush=True)
                return None
            if message is None:
                self.ended = True
            elif word in message:
                return message
        return None

    def records(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Lets it time, and gives what it measures."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.close()
        while (message := self.until("record", deadline)) is not None:
            yield message["record"]
        self.process.kill()
