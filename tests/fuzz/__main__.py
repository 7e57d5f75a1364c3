"""Fuzz by command: `python -m tests.fuzz --cases 100000 --output result.json`, or one target for a while."""

import argparse
import json
import multiprocessing
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import fullshard
from tests.fuzz.harness import Finding, Tally, judge
from tests.fuzz.targets import TARGETS

Batch = tuple[str, int, int, int]  # target, seed, first case, number of cases
BATCH = 50  # cases that a worker takes at a time


def carry_out(batch: Batch) -> tuple[str, Tally, list[Finding]]:
    name, seed, first, count = batch
    tally = Tally()
    found = [judge(TARGETS[name], seed, case, tally) for case in range(first, first + count)]
    return name, tally, [f for f in found if f]


def batches(names: list[str], seed: int, first: int, cases: int) -> list[Batch]:
    """The cases dealt out evenly, target after target, so that an early end leaves none out."""
    each = -(-cases // len(names))
    starts = range(first, first + each, BATCH)
    return [(name, seed, start, min(BATCH, first + each - start)) for start in starts for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"by default all: {', '.join(TARGETS)}")
    parser.add_argument("--cases", type=int, default=10_000, help="over all targets")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="end after this long")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"no target {min(unknown)}; there are {', '.join(TARGETS)}")
    work = batches(given.targets or list(TARGETS), given.seed, given.first, given.cases)
    tallies: dict[str, Tally] = {}
    findings: list[Finding] = []
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        for name, part, found in pool.imap_unordered(carry_out, work):
            tally = tallies.setdefault(name, Tally())
            tally.cases, tally.refused = tally.cases + part.cases, tally.refused + part.refused
            tally.largest = max(tally.largest, part.largest)
            findings += found
            for finding in found:
                print(finding, flush=True)
            if time.monotonic() - began > given.minutes * 60:
                break
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "fullshard": fullshard.__version__,
        "seed": given.seed,
        "seconds": round(time.monotonic() - began),
        "cases": sum(t.cases for t in tallies.values()),
        "findings": [str(f) for f in findings],
        "targets": {n: vars(tallies[n]) | {"bound": TARGETS[n].bound} for n in TARGETS if n in tallies},
    }
    print(f"{result['cases']} cases of {len(tallies)} targets in {result['seconds']} s: {len(findings)} findings")
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
