"""Some of the random orders of actions. `python -m tests.fuzz.orders` plays more of them."""

import pytest

from tests.fuzz.orders.draw import draw_case
from tests.fuzz.orders.runner import play


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_caller_does_the_state_is_that_of_the_unsharded_model(ranks, seed):
    case = draw_case(seed)
    wrong = play(case, ranks).wrong
    assert wrong is None, f"{wrong}\n{case}"
