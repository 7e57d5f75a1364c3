"""Some seconds of the fuzz suite. `python -m tests.fuzz` runs more of it."""

import time

import pytest

from tests.fuzz.harness import Counts, run_case
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("seconds", [0.5, pytest.param(10, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", TARGETS)
def test_each_case_is_accepted_or_refused_in_a_sentence(name, seconds):
    counts, end = Counts(), time.monotonic() + seconds
    while time.monotonic() < end:
        finding = run_case(TARGETS[name], seed=0, case=counts.cases, counts=counts)
        assert finding is None, str(finding)
    assert counts.refused, "no case was refused: the target makes no invalid input"
