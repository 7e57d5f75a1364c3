"""A minute of the fuzz suite; `python -m tests.fuzz` runs as much of it as asked for."""

import time

import pytest

from tests.fuzz.harness import Tally, judge
from tests.fuzz.targets import TARGETS

SECONDS = 60


@pytest.mark.parametrize("name", TARGETS)
def test_each_case_is_accepted_or_refused_in_a_sentence(name):
    tally, end = Tally(), time.monotonic() + SECONDS / len(TARGETS)
    while time.monotonic() < end:
        finding = judge(TARGETS[name], seed=0, case=tally.cases, tally=tally)
        assert finding is None, str(finding)
    assert tally.refused, "no case was refused: the target makes nothing that is wrong"
