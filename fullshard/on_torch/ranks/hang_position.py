"""Where a hung rank is: the collective and unit that it waits in, or the line of code that it runs.

The watchdog asks from its own thread while the main thread is stuck.
"""

import os
from types import FrameType
from typing import Any

from fullshard.on_torch.private.fsdp_groups import FSDPParamGroup
from fullshard.on_torch.private.torch_internals import flight_records
from fullshard.ranks.hang_reports import innermost_line, main_thread_frame, stack_of

TORCH_PATH = f"{os.sep}torch{os.sep}"
DISTRIBUTED_PATH = f"{TORCH_PATH}distributed{os.sep}"
RECORDED_NAMES = {"_allgather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}  # torch's flight recorder


def main_thread_position() -> dict[str, Any]:
    """The position of this rank's main thread, for a call from another thread.

    `waits`: whether it is in a collective. `collective` and `unit`: in which one, of which unit. `count`: how many
    collectives it has entered. `line`: the innermost line of code outside torch.
    """
    frame = main_thread_frame()
    stack = stack_of(frame)
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
        "line": innermost_line(stack, TORCH_PATH),
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
