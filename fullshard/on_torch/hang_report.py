"""Where a hung rank is: the collective and unit that it waits in, or the line of code that it runs.

The watchdog asks from its own thread while the main thread is stuck.
"""

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
from fullshard.on_torch.store_messages import StoreClient, call_with_timeout

TORCH_PATH = f"{os.sep}torch{os.sep}"
DISTRIBUTED_PATH = f"{TORCH_PATH}distributed{os.sep}"
RECORDED_NAMES = {"_allgather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}  # torch's flight recorder


class HangReporter:
    """What the watchdog can ask about the ranks. Every rank's main thread makes one at the start of a run."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        StoreClient().put(f"process/{self.rank}", [socket.gethostname(), os.getpid()])

    def where(self) -> dict[str, Any]:
        """As `main_thread_position`."""
        return main_thread_position()

    def stacks(self) -> str:
        """As `thread_stacks`."""
        return thread_stacks()

    def exchange(self, own: dict[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
        """Publish this rank's position. Returns the positions of all ranks that answer in time, this one included."""
        answers = {self.rank: own}

        def ask() -> None:
            client = StoreClient()
            client.put(f"hang/{self.rank}", own)
            answers.update(client.collect("hang", range(self.world), seconds))

        call_with_timeout(2 * seconds, ask)
        return dict(answers)

    def absent(self, rank: int) -> str:
        """Describe a rank that does not answer: its process, host and state, as far as they are known."""
        found = call_with_timeout(2.0, lambda: StoreClient().get(f"process/{rank}"))
        if not found:
            return f"rank {rank} does not answer"
        host, pid = found
        state = process_state(pid) if host == socket.gethostname() else "it is stopped, or its machine is"
        return f"rank {rank} (process {pid} on {host}) does not answer: {state}"


def process_state(pid: int) -> str:
    """The kernel's state of a process on this machine, as a clause."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "it is gone"
    state = next((line.split(maxsplit=1)[1] for line in lines if line.startswith("State:")), "unknown")
    return f"its state is {state}"


def main_thread_position() -> dict[str, Any]:
    """The position of this rank's main thread, for a call from another thread.

    `waits`: whether it is in a collective. `collective` and `unit`: in which one, of which unit. `count`: how many
    collectives it has entered. `line`: the innermost line of code outside torch.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame else traceback.StackSummary()
    records = [r for r in flight_records() if not r.get("is_p2p")]
    pending = next((r for r in records if not r.get("retired") and r.get("state") != "completed"), None)
    inside = [f for f in stack if DISTRIBUTED_PATH in f.filename]
    waits = bool(inside) and inside[-1] is stack[-1]
    on_device = pending is not None and bool(stack) and TORCH_PATH in stack[-1].filename  # the host waits for the device
    return {
        "waits": waits or on_device,
        "collective": _collective(pending),
        "unit": _unit(frame),
        "count": sum({str(r.get("process_group")): r.get("collective_seq_id", 0) for r in records}.values()),
        "line": _line(stack),
    }


def _collective(pending: dict[str, Any] | None) -> str | None:
    name = str(pending["profiling_name"]).partition(":")[2] if pending and "profiling_name" in pending else None
    return RECORDED_NAMES.get(name, name) if name else None


def _unit(frame: FrameType | None) -> str | None:
    """The modules of the innermost FSDP parameter group on a stack, if there is one."""
    while frame is not None:
        group = frame.f_locals.get("self")
        if isinstance(group, FSDPParamGroup):
            return str(group._module_fqn or "the root")
        frame = frame.f_back
    return None


def _line(stack: traceback.StackSummary) -> str:
    own = [f for f in stack if TORCH_PATH not in f.filename]
    return f"{own[-1].name} ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else "no code of Python"


def thread_stacks() -> str:
    """The Python stacks of all threads, as text."""
    names = {t.ident: t.name for t in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)
