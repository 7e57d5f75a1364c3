"""What a step's peak of memory is made of: as the allocator recorded it, and as the planner expected it.

The allocator keeps the Python stack of each allocation. Kernels of eager backward run on autograd's thread and have none. So
a block is named by the innermost frame that is not torch's own, or by the part of torch that asked for it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import fullshard as fs
from fullshard.planner.memory.allocator import GRAIN
from fullshard.planner.memory.peak_memory import _highest
from fullshard.planner.memory.peak_memory import steady as steady_tape
from fullshard.planner.step.schedule import schedule

# The first that matches any frame names the block: what it is for, and a pattern of file or function names.
KINDS = {
    "gathered": r"all_gather|_to_unsharded|unshard|gather_group|init_unsharded",
    "reduce": r"reduce_scatter|post_backward|foreach_reduce|_reduce_",
    "update": r"optimizer|adam|clip_|unit_norms|total_norm",
    "loss": r"loss_chunks|triton_softmax|on_torch/loss|cross_entropy",
    "compiled backward": r"runtime_wrappers.py:(_?backward|_backward_impl|impl_fn)",
    "recomputed": r"checkpoint.py:(recompute_fn|unpack_hook|recompute)",
    "compiled": r"torchinductor|output_code.py",
}
OWN = re.compile(r"/(torch|fullshard|benchmarks)/")
Block = tuple[int, str]  # bytes, and what it is


@contextmanager
def recorded() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Record what the allocator does within. Gives a function that returns it."""
    import torch

    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=1_000_000)
    try:
        yield lambda: torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def measured_peak(trace: list[dict[str, Any]], before: int) -> dict[str, Any]:
    """The blocks alive at the highest point of a trace that began with `before` bytes: by kind, and the largest."""
    deltas = [e["size"] * {"alloc": 1, "free_completed": -1}.get(e["action"], 0) for e in trace]
    sums = list(accumulate(deltas, initial=before))
    highest = max(range(len(sums)), key=sums.__getitem__)
    alive: dict[int, dict[str, Any]] = {}
    old = before
    for event in trace[:highest]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed" and alive.pop(event["addr"], None) is None:
            old -= event["size"]  # from before the trace
    blocks = [(e["size"], f"{kind_of(e)}: {place_of(e)}") for e in alive.values()]
    made_by = next((f"{kind_of(e)}: {place_of(e)}" for e in reversed(trace[:highest]) if e["action"] == "alloc"), "")
    return {"bytes": sums[highest], "at": made_by, **summed([(old, "before: "), *blocks])}


def kind_of(event: dict[str, Any]) -> str:
    """What a block is for, by the stack of its allocation."""
    frames = [f"{f['filename']}:{f['name']}" for f in event.get("frames", ())]
    if not frames:
        return "backward"
    found = [kind for kind, pattern in KINDS.items() if any(re.search(pattern, frame) for frame in frames)]
    return found[0] if found else "forward"


def place_of(event: dict[str, Any]) -> str:
    """The innermost frame outside torch, or the innermost one."""
    frames = event.get("frames", ())
    frame = next((f for f in frames if not OWN.search(f["filename"])), frames[0] if frames else None)
    return "" if frame is None else f"{'/'.join(frame['filename'].split('/')[-2:])}:{frame['line']} {frame['name']}"


def planned_peak(plan: fs.Plan, description: fs.Description, loss: str) -> dict[str, Any]:
    """The same of the planner's own record of a step."""
    operations = schedule(plan, description, loss=loss)
    tape = steady_tape(plan, description, operations, slots=2)
    highest, where = _highest(tape)
    alive: dict[int, Block] = {}
    operation = lambda index: operations[min(index, len(operations) - 1)]
    for delta, term, number, _, index in tape.entries[: where + 1]:
        if delta > 0 and number:
            op = operation(index)
            what = f"{op.phase if op.kind == 'compute' else op.kind} of {op.unit or 'the step'}"
            alive[number] = (delta // -GRAIN * -GRAIN, f"{term}: {what}")
        elif number:
            alive.pop(number, None)
    op = operation(tape.entries[where][4])
    return {"bytes": highest, "at": f"{op.kind} {op.phase} of {op.unit}", **summed(list(alive.values()))}


def summed(blocks: list[Block], most: int = 40) -> dict[str, Any]:
    """Bytes by kind, and the largest sums of blocks of the same size and origin."""
    kinds: Counter[str] = Counter()
    alike: Counter[tuple[int, str]] = Counter()
    for nbytes, what in blocks:
        kinds[what.split(": ")[0]] += nbytes
        alike[nbytes, what] += 1
    largest = sorted(alike.items(), key=lambda item: -item[0][0] * item[1])[:most]
    return {"kinds": dict(kinds.most_common()), "blocks": [[n, nbytes, what] for (nbytes, what), n in largest]}
