"""Check a profile against the allocator's numbers, its snapshot and the run's own clock, on a machine with CUDA.

fullshard profile RECIPE --run RUN
python benchmarks/profile_gpu.py RUN

Prints one line a check. Exit code 1 if one fails.
"""

import json
import pickle
import sys
from pathlib import Path

SECONDS, BYTES = 0.02, 0.01  # shares by which the profile may differ from the clock, and from the allocator's peak


def main() -> None:
    run = Path(sys.argv[1])
    directory = next((run / "profile").glob("step-*"))
    found = json.loads((directory / "breakdown.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = checks(found, lines, snapshot_peak(directory / "rank-00000.memory.pickle"))
    wrong = [row for row in rows if not check(*row)]
    sys.exit(bool(wrong))


def snapshot_peak(path: Path) -> int:
    """The most that was allocated while the snapshot recorded: what is there at its end, and its history backwards."""
    with path.open("rb") as file:
        snapshot = pickle.load(file)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    now = peak = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
    for event in reversed(snapshot["device_traces"][0]):
        now += {"alloc": -1, "free_requested": 1}.get(event["action"], 0) * event["size"]
        peak = max(peak, now)
    return peak


def checks(found: dict, lines: list[dict], snapshot: int) -> list[tuple[str, float, float, float]]:
    """What, of the profile, of the run or the allocator, and by which share they may differ."""
    steps = [line for line in lines if line.get("step") in found["steps"] and "seconds" in line]
    first, memory = found["ranks"][0], found["memory"]
    clock = sum(line["seconds"] for line in steps) / len(steps)
    peak = max(line["memory_allocated"] for line in steps)
    return [
        ("a step's seconds, by the run's clock", first["step_seconds"], clock, SECONDS),
        ("the sum of the lanes", sum(first["lanes"].values()), first["step_seconds"], 1e-9),
        ("peak bytes of the trace, by the allocator", memory["bytes"], peak, BYTES),
        ("the allocator's peak as the profile has it", memory["allocator_bytes"], peak, 0.0),
        ("peak bytes of the trace, by the snapshot", memory["bytes"], snapshot, BYTES),
        ("bytes by unit and kind", sum(n for row in memory["units"].values() for n in row.values()), memory["bytes"], 0.0),
    ]


def check(what: str, profiled: float, wanted: float, share: float) -> bool:
    good = abs(profiled - wanted) <= share * wanted
    print(f"{'ok' if good else 'WRONG'}  {what}: {profiled:.6g}, should be {wanted:.6g} (within {share:.2g})")
    return good


if __name__ == "__main__":
    main()
