"""Cases in batches, for worker processes: they import this module, where they cannot import `__main__`."""

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
