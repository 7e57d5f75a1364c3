"""Parameters that only some ranks use in a step, such as experts without tokens: trained as the unsharded model's."""

import pytest

import fullshard as fs
from tests.cpu import unused

FULL, OLDEST = pytest.mark.full, pytest.mark.oldest_torch  # a module that never runs holds its unit up there
CASES = [
    ("zero3", {}),
    pytest.param("zero3", {"own": True}, marks=FULL),
    pytest.param("zero2", {"parts": 2, "never": True}, marks=OLDEST),
    pytest.param("zero3", {"never": True}, marks=(FULL, OLDEST)),
    pytest.param("zero3", {"never": True, "own": True}, marks=(FULL, OLDEST)),
    pytest.param("zero1", {"parts": 2}, marks=FULL),
    pytest.param("ddp", {}, marks=FULL),
    pytest.param("ddp", {"never": True, "own": True, "parts": 2}, marks=(FULL, OLDEST)),
    pytest.param("zero3", {"home": fs.Home(optimizer="host"), "clip": 1e9}, marks=FULL),
    pytest.param("zero3", {"home": fs.Home("host", "host"), "own": True, "never": True}, marks=OLDEST),
    pytest.param("zero3", {"home": fs.Home(optimizer="host"), "parts": 2, "never": True}, marks=(FULL, OLDEST)),
]


@pytest.mark.parametrize(("strategy", "more"), CASES, ids=str)
def test_parameters_that_some_ranks_use_train_as_unsharded(ranks, strategy, more):
    found = ranks(2).run(unused.apart, strategy, **more)
    assert all(off < 2e-6 for each in found for off in each.values()), found
