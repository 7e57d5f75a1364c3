"""What the watchdog can ask about the ranks while their main threads are stuck: where each is, and what became of those that do
not answer."""

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from fullshard.ranks.rank_protocols import Messages, Where

T = TypeVar("T")


class HangReporter:
    """What the watchdog can ask. Every rank's main thread makes one at the start of a run.

    `messages`: opens a connection for the thread that calls it. `position`: where this rank's main thread is. `keep_alive`: see
    `engine.ranks`.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        messages: Callable[[], Messages],
        position: Callable[[], Where],
        keep_alive: Callable[[float | None], None],
    ):
        self.rank, self.world, self.messages, self.position = rank, world, messages, position
        self.keep_alive = keep_alive
        messages().put(f"process/{rank}", [socket.gethostname(), os.getpid()])

    def where(self) -> Where:
        return self.position()

    def stacks(self) -> str:
        """As `thread_stacks`."""
        return thread_stacks()

    def exchange(self, own: Where, seconds: float) -> dict[int, Where]:
        """Publish this rank's position. Returns the positions of all ranks that answer in time, this one included."""
        answers = {self.rank: own}

        def ask() -> None:
            client = self.messages()
            client.put(f"hang/{self.rank}", own)
            answers.update(client.collect("hang", range(self.world), seconds))

        call_with_timeout(2 * seconds, ask)
        return dict(answers)

    def absent(self, rank: int) -> str:
        """Describe a rank that does not answer: its process, host and state, as far as they are known."""
        found: Any = call_with_timeout(2.0, lambda: self.messages().get(f"process/{rank}"))
        if not found:
            return f"rank {rank} does not answer"
        host, pid = found
        state = process_state(pid) if host == socket.gethostname() else "it is stopped, or its machine is"
        return f"rank {rank} (process {pid} on {host}) does not answer: {state}"

    def failed(self) -> int | None:
        """The exit code of the first failure that a rank has reported, if any."""
        found: Any = call_with_timeout(2.0, lambda: self.messages().get("failure"))
        return found["code"] if found else None


class OneRank:
    """What the watchdog can ask in a process that has not met other ranks."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ.get("RANK", 0)), 0

    def where(self) -> Where:
        line = innermost_line(stack_of(main_thread_frame()), "site-packages")
        return {"waits": False, "collective": None, "unit": None, "count": 0, "line": line}

    def exchange(self, own: Where, seconds: float) -> dict[int, Where]:
        return {self.rank: own}

    def absent(self, rank: int) -> str:
        return f"rank {rank} does not answer"

    def failed(self) -> int | None:
        return None

    def keep_alive(self, seconds: float | None) -> None:
        return

    def stacks(self) -> str:
        """As `thread_stacks`."""
        return thread_stacks()


def main_thread_frame() -> FrameType | None:
    """The innermost frame of the main thread, for a call from another thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def stack_of(frame: FrameType | None) -> list[traceback.FrameSummary]:
    """The frames of a stack, outermost first. Reads no source file: its disk may not answer."""
    frames = list(traceback.walk_stack(frame)) if frame else []
    return [traceback.FrameSummary(f.f_code.co_filename, at, f.f_code.co_name, lookup_line=False) for f, at in reversed(frames)]


def innermost_line(stack: list[traceback.FrameSummary], library: str) -> str:
    """The innermost line of code whose path does not have `library` in it."""
    own = [f for f in stack if library not in f.filename]
    return f"{own[-1].name} ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else "no code of Python"


def thread_stacks() -> str:
    """The Python stacks of all threads, as text."""
    names = {t.ident: t.name for t in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)


def process_state(pid: int) -> str:
    """The kernel's state of a process on this machine, as a clause."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "it is gone"
    state = next((line.split(maxsplit=1)[1] for line in lines if line.startswith("State:")), "unknown")
    return f"its state is {state}"


def call_with_timeout(seconds: float, call: Callable[[], T]) -> T | None:
    """The result of `call`; None if it raises or takes longer. The rank that hosts the store may be gone."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception:  # a store that shuts down may raise anything
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
