"""What a rank tells about itself while it runs: RUN/ranks/00000.json and so on, replaced every few seconds.

Written beside the main thread, so that a rank that waits in a collective still tells. Nothing in a run reads it.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from fullshard.storage.memory_limits import resident_bytes

EVERY = 5.0  # seconds between two writes of a rank, at least
WRITES = 20.0  # a second of all ranks together, at most: they may share a file system


class Heartbeat:
    """Writes the file of one rank. What cannot be written is said once; the run goes on."""

    def __init__(self, directory: Path, rank: int, world: int):
        self.path = directory / f"{rank:05d}.json"
        self.every = max(EVERY, world / WRITES)
        self.about: dict[str, Any] = {"rank": rank, "world": world, "host": socket.gethostname(), "pid": os.getpid()}
        self.next = 0.0
        self.failed = False

    def due(self) -> bool:
        """Whether the last time is long enough ago."""
        return time.monotonic() >= self.next

    def beat(self, *, step: int, doing: str, idle: float, step_seconds: float | None, ended: bool = False) -> None:
        """Write, unless the last time was just now. `ended`: the rank is done, and this is its last word."""
        if not (ended or self.due()):
            return
        self.next = time.monotonic() + self.every
        progress = {"step": step, "doing": doing, "idle_seconds": round(idle, 1), "step_seconds": step_seconds, "ended": ended}
        self._write(self.about | progress | {"rss": resident_bytes().get("host_rss"), "every": self.every, "time": time.time()})

    def _write(self, record: dict[str, Any]) -> None:
        fresh = self.path.with_name(f".{self.path.name}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(record) + "\n")
            fresh.replace(self.path)  # a reader sees the old one or the new one
        except OSError as error:
            if not self.failed:
                print(f"cannot write {self.path}: {error.strerror}; the run goes on without it", file=sys.stderr, flush=True)
            self.failed = True
