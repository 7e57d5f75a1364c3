"""Batches of cases for worker processes. A module of its own, because workers cannot import `__main__`."""

from tests.fuzz.harness import Counts, Finding, run_case
from tests.fuzz.targets import TARGETS

Batch = tuple[str, int, int, int]  # target, seed, first case, number of cases
BATCH = 50  # cases that a worker takes at a time


def run_batch(batch: Batch) -> tuple[str, Counts, list[Finding]]:
    name, seed, first, count = batch
    counts = Counts()
    found = [run_case(TARGETS[name], seed, case, counts) for case in range(first, first + count)]
    return name, counts, [f for f in found if f]


def batches(names: list[str], seed: int, first: int, cases: int) -> list[Batch]:
    """Split the cases into batches, one target after the other in turn, so that an early end leaves no target out."""
    each = -(-cases // len(names))
    starts = range(first, first + each, BATCH)
    return [(name, seed, start, min(BATCH, first + each - start)) for start in starts for name in names]
