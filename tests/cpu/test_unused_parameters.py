"""Parameters that only some ranks use in a step, such as experts without tokens: trained as the unsharded model's."""

import pytest

import fullshard as fs
from tests.cpu import unused

CASES = [
    ("zero3", {}),
    pytest.param("zero3", {"own": True}, marks=pytest.mark.full),
    ("zero2", {"parts": 2, "never": True}),
    pytest.param("zero3", {"never": True}, marks=pytest.mark.full),
    pytest.param("zero3", {"never": True, "own": True}, marks=pytest.mark.full),
    pytest.param("zero1", {"parts": 2}, marks=pytest.mark.full),
    pytest.param("ddp", {}, marks=pytest.mark.full),
    pytest.param("ddp", {"never": True, "own": True, "parts": 2}, marks=pytest.mark.full),
    pytest.param("zero3", {"home": fs.Home(optimizer="host"), "clip": 1e9}, marks=pytest.mark.full),
    ("zero3", {"home": fs.Home("host", "host"), "own": True, "never": True}),
    pytest.param("zero3", {"home": fs.Home(optimizer="host"), "parts": 2, "never": True}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("strategy", "more"), CASES, ids=str)
def test_parameters_that_some_ranks_use_train_as_unsharded(ranks, strategy, more):
    found = ranks(2).run(unused.apart, strategy, **more)
    assert all(off < 2e-6 for each in found for off in each.values()), found
