"""Fuzz by command: `python -m tests.fuzz --cases 100000 --output result.json`, or one target for a while."""

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
from tests.fuzz.batches import batches, carry_out
from tests.fuzz.harness import Finding, Tally
from tests.fuzz.targets import TARGETS


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
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
        # A worker that dies, of a signal or of a case that is stuck, breaks the pool: an error, not a wait without end.
        for done in as_completed([pool.submit(carry_out, batch) for batch in work]):
            name, part, found = done.result()
            tally = tallies.setdefault(name, Tally())
            tally.cases, tally.refused = tally.cases + part.cases, tally.refused + part.refused
            tally.largest = max(tally.largest, part.largest)
            findings += found
            for finding in found:
                print(finding, flush=True)
            if time.monotonic() - began > given.minutes * 60:
                pool.shutdown(cancel_futures=True)
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
