"""Run the fuzz suite: `python -m tests.fuzz --cases 100000 --output result.json`. Names of targets select some of it."""

import argparse
import json
import multiprocessing
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path

import fullshard
from tests.fuzz.batches import batches, run_batch
from tests.fuzz.harness import Counts, Finding
from tests.fuzz.targets import TARGETS


def main() -> None:
    given = _arguments()
    began = time.monotonic()
    counts, findings = _run_all(given)
    seconds = round(time.monotonic() - began)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "fullshard": fullshard.__version__,
        "seed": given.seed,
        "seconds": seconds,
        "cases": sum(c.cases for c in counts.values()),
        "findings": [str(f) for f in findings],
        "targets": {n: vars(counts[n]) | {"bound": TARGETS[n].bound} for n in TARGETS if n in counts},
    }
    print(f"{result['cases']} cases of {len(counts)} targets in {seconds} s: {len(findings)} findings")
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if findings else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"by default all: {', '.join(TARGETS)}")
    parser.add_argument("--cases", type=int, default=10_000, help="over all targets")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"no target {min(unknown)}; there are {', '.join(TARGETS)}")
    return given


def _run_all(given: argparse.Namespace) -> tuple[dict[str, Counts], list[Finding]]:
    """Run all batches in worker processes, until they or the minutes are over. Prints findings as they come."""
    work = batches(given.targets or list(TARGETS), given.seed, given.first, given.cases)
    counts: dict[str, Counts] = {}
    findings: list[Finding] = []
    deadline = time.monotonic() + given.minutes * 60
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
        # A worker that is killed, or ended because a case hangs, breaks the pool: that raises here instead of waiting.
        for done in as_completed([pool.submit(run_batch, batch) for batch in work]):
            name, part, found = done.result()
            counts.setdefault(name, Counts()).add(part)
            findings += found
            for finding in found:
                print(finding, flush=True)
            if time.monotonic() > deadline:
                pool.shutdown(cancel_futures=True)
                break
    return counts, findings


if __name__ == "__main__":
    main()
