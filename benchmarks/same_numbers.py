"""What a restructuring must leave as it is, as one file: predicted bytes, seconds to 1e-9 of them, and losses to the bit.

    python -m benchmarks.same_numbers --out before.json                       # on the tree before
    python -m benchmarks.same_numbers --against before.json                   # after: what differs, exit code 1
    python -m benchmarks.same_numbers --runs --against before.json            # losses of runs too

Predictions: every preset under every strategy, on 8 and 64 H100, with homes, remat and precision in turn. `--drawn` adds plans
of random choices. Losses: of some steps on two ranks over gloo, one thread each. Needs no GPU.
"""

import argparse
import fnmatch
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fullshard as fs
from benchmarks.drawn_plans import drawn
from fullshard.model.presets import PRESETS

ROOT = Path(__file__).parents[1]
CLUSTERS = ("8xh100", "64xh100")
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {},
    "zero2": {},
    "zero3": {},
    "hybrid": {"replicate": 2},
    "hpz": {"reshard": 4},
}
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"precision": fs.Precision("fp32")},
    "full": {"remat": "full"},
    "selective": {"remat": "selective"},
    "state on the host": {"home": fs.Home("device", "host")},
    "all on the host": {"home": fs.Home("host", "host", "host"), "remat": "full"},
    "accumulated": {"batch": fs.Batch(1, 2048, accumulate=4)},
}
RUNS: dict[str, list[str]] = {  # changes of recipes/bytes.toml
    "zero3": ["plan.strategy=zero3"],
    "zero2 accumulated": ["plan.strategy=zero2", "train.micro_batch=2"],
    "ddp full": ["plan.strategy=ddp", "plan.remat=full"],
    "bf16": ["plan.strategy=zero3", "plan.compute=bf16"],
    "state on the host": ["plan.strategy=zero3", "home.optimizer=host"],
    "all on the host": ["plan.strategy=zero3", "home.params=host", "home.optimizer=host", "home.activations=host"],
    "state on disk": ["plan.strategy=zero3", "home.optimizer=disk", "disk.path=."],
}
SAME = 1e-9  # of seconds
STEPS = 6
TEXT = "".join(f"The square of {i} is {i * i}.\n" for i in range(20_000))
LOSS = re.compile(r'"loss": ([^,}]+)')


def predictions(only: str) -> Iterator[tuple[str, Any]]:
    """(name, numbers or the sentence that refuses the plan). `only`: a pattern of presets."""
    for preset in fnmatch.filter(PRESETS, only):
        description = fs.presets.describe(preset)
        for cluster_name in CLUSTERS:
            cluster = fs.Cluster.load(cluster_name)
            for strategy, arguments in STRATEGIES.items():
                for choice, more in CHOICES.items():
                    name = f"{preset} {cluster_name} {strategy} {choice}"
                    try:
                        given = {"precision": fs.Precision("bf16"), "batch": fs.Batch(1, 2048)} | arguments | more
                        plan = fs.strategy(strategy, description, devices=cluster.devices, **given)
                        yield name, numbers(fs.estimate(plan, description, cluster))
                    except fs.FullshardError as error:
                        yield name, str(error)


def numbers(found: fs.Estimate) -> dict[str, Any]:
    memory = {"device": found.device, "host": found.host, "disk": found.disk}
    return {name: [tier.allocated_bytes, tier.reserved_bytes, tier.terms] for name, tier in memory.items()} | {
        "seconds": found.step_seconds,
        "lanes": found.lanes,
        "exposed": found.exposed,
        "compute": found.compute,
    }


def runs() -> Iterator[tuple[str, Any]]:
    """(name, the losses as they are written)."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text(TEXT)
        _fullshard(folder, "data", "pack", "text.txt", "-o", "tokens")
        for name, changes in RUNS.items():
            common = [f"train.steps={STEPS}", "schedule.warmup=2", "--ranks", "2", "--run", name.replace(" ", "-")]
            done = _fullshard(folder, "train", str(ROOT / "recipes/bytes.toml"), *changes, *common)
            written = Path(folder, name.replace(" ", "-"), "metrics.jsonl")
            if done.returncode:
                sys.exit(f"run {name}: {done.stderr or done.stdout}")
            yield f"run {name}", LOSS.findall(written.read_text())


def _fullshard(folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "fullshard", *arguments]
    return subprocess.run(line, cwd=folder, env=os.environ | alone, capture_output=True, text=True)


def apart(a: Any, b: Any) -> float:
    """How far two rows are apart: infinitely, but for seconds, which are sums whose order may change."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((apart(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max(map(apart, a, b), default=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return 0.0 if abs(a - b) < 1e-15 else abs(a - b) / max(abs(a), abs(b))
    return 0.0 if a == b else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write what is found")
    parser.add_argument("--against", type=Path, help="compare with what was written")
    parser.add_argument("--only", default="*", help="a pattern of presets")
    parser.add_argument("--drawn", type=int, default=0, help="plans of random choices as well, so many")
    parser.add_argument("--runs", action="store_true", help="losses as well, which takes minutes")
    arguments = parser.parse_args()
    rows = dict(predictions(arguments.only)) | dict(row for seed in range(arguments.drawn) for row in drawn(seed))
    found = json.loads(json.dumps(rows | (dict(runs()) if arguments.runs else {})))
    predicted = sum(isinstance(value, dict) for value in found.values())
    print(f"{len(found):,} rows, {predicted:,} predictions", file=sys.stderr)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=0))
    if arguments.against:
        before = json.loads(arguments.against.read_text())
        differences = {name: apart(found[name], before[name]) for name in found if name in before}
        differing = [name for name, how_far in differences.items() if how_far > SAME]
        for name in differing:
            print(f"{name}:\n  before {str(before[name])[:200]}\n  now    {str(found[name])[:200]}")
        most = max((d for d in differences.values() if d <= SAME), default=0.0)
        print(
            f"{len(differing):,} of {len(differences):,} rows differ; seconds of the others by up to {most:.1e}", file=sys.stderr
        )
        sys.exit(bool(differing))


if __name__ == "__main__":
    main()
