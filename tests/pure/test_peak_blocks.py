"""What `benchmarks.peak_blocks` says of a recorded step, on a trace written by hand."""

from typing import Any

import fullshard as fs
from benchmarks.peak_blocks import measured_peak, planned_peak
from fullshard.model import presets
from fullshard.planner.memory.peak_memory import predict

MIB = 1 << 20


def event(action: str, size: int, addr: int, *frames: str) -> dict[str, Any]:
    found = [dict(zip(("filename", "name"), frame.split(":"), strict=True), line=7) for frame in frames]
    return {"action": action, "size": size * MIB, "addr": addr, "frames": found}


def test_a_peak_is_what_was_there_before_and_what_was_allocated_and_not_freed() -> None:
    trace = [
        event("alloc", 5, 1, "/site/torch/distributed/fsdp/_fsdp_collectives.py:foreach_all_gather"),
        event("free_completed", 3, 99),  # from before
        event("alloc", 7, 2, "/tmp/torchinductor_me/ab/cde.py:call"),
        event("free_completed", 5, 1),
        event("alloc", 6, 1),  # the address is used again
        event("alloc", 2, 3, "/site/torch/nn/functional.py:silu", "/home/me/model.py:forward"),
        event("free_requested", 6, 1),
        event("free_completed", 6, 1),
    ]
    found = measured_peak(trace, before=10 * MIB)
    assert found["bytes"] == (10 - 3 + 7 + 6 + 2) * MIB
    assert found["kinds"] == {"before": 7 * MIB, "compiled": 7 * MIB, "backward": 6 * MIB, "forward": 2 * MIB}
    assert found["at"] == "forward: me/model.py:7 forward"


def test_the_planned_peak_is_the_planners() -> None:
    found = presets.describe("llama-125m")
    plan = fs.zero3(found, devices=8, precision=fs.Precision(compute="bf16"), batch=fs.Batch(2, 1024))
    peak, expected = planned_peak(plan, found, "chunked"), predict(plan, found, reserved=False)
    assert peak["bytes"] == sum(peak["kinds"].values()) == expected.allocated
    assert peak["kinds"]["optimizer"] == expected.terms["optimizer"]
