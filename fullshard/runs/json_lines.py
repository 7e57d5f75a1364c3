"""A file of JSON lines that a run appends to. A full disk costs it lines, and not the run."""

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

HELD = 10_000  # lines that wait for room at most; the oldest go first


class Lines:
    """Appends whole lines. What cannot be written waits, in memory, and is tried again with the next line; what a failed
    write left of a line is cut off. `lost`: lines that will never be written, because too many waited."""

    def __init__(self, path: Path):
        self.path, self.waiting, self.lost, self.error = path, deque[bytes](), 0, ""
        self.file: int | None = None
        self.size = 0  # bytes of whole lines

    def open(self) -> None:
        """Raises OSError; else it is opened with the first line."""
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.size = os.fstat(self.file).st_size

    def append(self, record: dict[str, Any]) -> None:
        self.waiting.append((json.dumps(record, ensure_ascii=False) + "\n").encode(errors="replace"))
        if len(self.waiting) > HELD:
            self.waiting.popleft()
            self.lost += 1
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as there is room."""
        try:
            if self.waiting and self.file is None:
                self.open()
            while self.waiting:
                self._write(self.waiting[0])
                self.waiting.popleft()
        except OSError as error:
            self.error = error.strerror or str(error)

    def _write(self, line: bytes) -> None:
        assert self.file is not None
        done = 0
        try:
            while done < len(line):
                done += os.pwrite(self.file, line[done:], self.size + done)
        except OSError:
            os.ftruncate(self.file, self.size)
            raise
        self.size += len(line)

    @property
    def unwritten(self) -> int:
        return len(self.waiting) + self.lost

    def close(self) -> None:
        self.flush()
        if self.file is not None:
            os.close(self.file)
            self.file = None
