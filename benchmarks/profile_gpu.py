"""Check a profile against the allocator's numbers and the run's own clock, on a machine with CUDA.

fullshard data pack docs -o tokens
python benchmarks/profile_gpu.py [RECIPE] [SECTION.KEY=VALUE ...]

Runs `fullshard profile` and prints one line a check. Exit code 1 if one fails.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS, BYTES = 0.02, 0.01  # shares by which the profile may differ from the clock, and from the allocator's peak


def main() -> None:
    recipe, *overrides = sys.argv[1:] or ["recipes/llama-125m.toml"]
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        subprocess.run(["fullshard", "profile", recipe, *overrides, "--run", str(run)], check=True)
        found = json.loads(next((run / "profile").glob("step-*/breakdown.json")).read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    sys.exit(not all(check(*each) for each in checks(found, lines)))


def checks(found: dict, lines: list[dict]) -> list[tuple[str, float, float, float]]:
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
        ("bytes by unit and kind", sum(n for row in memory["units"].values() for n in row.values()), memory["bytes"], 0.0),
    ]


def check(what: str, profiled: float, wanted: float, share: float) -> bool:
    good = abs(profiled - wanted) <= share * wanted
    print(f"{'ok' if good else 'WRONG'}  {what}: {profiled:.6g}, should be {wanted:.6g} (within {share:.2g})")
    return good


if __name__ == "__main__":
    main()
