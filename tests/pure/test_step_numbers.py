"""The numbers of a step by name, and those that a resumed run goes on with."""

import math
from types import SimpleNamespace

from fullshard.runs.step_numbers import Counts, Flags, StepNumbers


def step(*numbers: float) -> StepNumbers:
    return StepNumbers.of(SimpleNamespace(numbers=lambda: numbers, metrics={"accuracy": 0}, unit_norms={"a": 0, "b": 0}))


def test_each_number_has_its_name():
    found = step(1.5, 2.0, 64, 0, 0, 1, 0, 0.25, 3.0, 4.0)
    assert (found.loss, found.grad_norm, found.count, found.skipped, found.finite) == (1.5, 2.0, 64, False, True)
    assert found.flags == Flags(asked=False, due=True, troubled=False)
    assert (found.metrics, found.unit_norms) == ({"accuracy": 0.25}, {"a": 3.0, "b": 4.0})


def test_counts_survive_a_checkpoint():
    counts = Counts()
    counts.step(step(math.nan, 1, 1, 0, 0, 0, 0, 0, 0, 0))
    counts.step(step(1.0, 1, 1, 1, 0, 0, 0, 0, 0, 0))
    assert (counts.skips, counts.skips_in_a_row) == (1, 2)
    for loss in (3.0, 2.0, 1.95):
        counts.evaluated(loss, min_delta=0.1)
    assert (counts.best, counts.since_best) == (2.0, 1)
    assert Counts.of(SimpleNamespace(state={"extra": counts.stored()})) == counts
    assert Counts().stored()["best"] is None
    assert Counts.of(SimpleNamespace(state={"extra": Counts().stored() | {"skips": "many"}})) == Counts()
