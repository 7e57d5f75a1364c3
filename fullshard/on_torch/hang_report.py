"""Where this rank is: in which collective of which unit it waits, or in which line of code it is. For the watchdog, which
asks from a thread of its own while the rank's main thread is stuck."""

import os
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from fullshard.on_torch.private import FSDPParamGroup, flight_records
from fullshard.on_torch.store_messages import Board, within

TORCH = f"{os.sep}torch{os.sep}"
DISTRIBUTED = f"{TORCH}distributed{os.sep}"
NAMES = {"_allgather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}  # as torch's recorder spells them


class Watched:
    """The ranks, as the watchdog asks about them. Made at the start of a run by every rank's main thread."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        Board().put(f"process/{self.rank}", [socket.gethostname(), os.getpid()])

    def where(self) -> dict[str, Any]:
        return whereabouts()

    def stacks(self) -> str:
        return stacks()

    def exchange(self, own: dict[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
        """What all ranks say that answer in time; this one at least."""
        answers = {self.rank: own}

        def ask() -> None:
            board = Board()
            board.put(f"hang/{self.rank}", own)
            answers.update(board.collect("hang", range(self.world), seconds))

        within(2 * seconds, ask)
        return dict(answers)

    def absent(self, rank: int) -> str:
        """A process that does not answer: is it stopped, or not there at all?"""
        found = within(2.0, lambda: Board().get(f"process/{rank}"))
        if not found:
            return f"rank {rank} does not answer"
        where, pid = found
        state = process_state(pid) if where == socket.gethostname() else "it is stopped, or its machine is"
        return f"rank {rank} (process {pid} on {where}) does not answer: {state}"


def process_state(pid: int) -> str:
    """What the kernel says of a process of this machine."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "it is gone"
    state = next((line.split(maxsplit=1)[1] for line in lines if line.startswith("State:")), "unknown")
    return f"its state is {state}"


def whereabouts() -> dict[str, Any]:
    """Of this rank's main thread; called from another one. `waits`: whether it is in a collective, `collective`: which one,
    `unit`: whose, `count`: how many it has entered, `line`: the innermost line of code that is not torch's own."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame else traceback.StackSummary()
    records = [r for r in flight_records() if not r.get("is_p2p")]
    pending = next((r for r in records if not r.get("retired") and r.get("state") != "completed"), None)
    inside = [f for f in stack if DISTRIBUTED in f.filename]
    waits = bool(inside) and inside[-1] is stack[-1]
    on_device = pending is not None and bool(stack) and TORCH in stack[-1].filename  # the host waits for the device
    return {
        "waits": waits or on_device,
        "collective": _collective(pending),
        "unit": _unit(frame),
        "count": sum({str(r.get("process_group")): r.get("collective_seq_id", 0) for r in records}.values()),
        "line": _line(stack),
    }


def _collective(pending: dict[str, Any] | None) -> str | None:
    name = str(pending["profiling_name"]).partition(":")[2] if pending and "profiling_name" in pending else None
    return NAMES.get(name, name) if name else None


def _unit(frame: FrameType | None) -> str | None:
    """The modules of the FSDP group that a stack is in, from its innermost frame out."""
    while frame is not None:
        group = frame.f_locals.get("self")
        if isinstance(group, FSDPParamGroup):
            return str(group._module_fqn or "the root")
        frame = frame.f_back
    return None


def _line(stack: traceback.StackSummary) -> str:
    own = [f for f in stack if TORCH not in f.filename]
    return f"{own[-1].name} ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else "no code of Python"


def stacks() -> str:
    """Every thread's stack, for a file."""
    names = {t.ident: t.name for t in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)
