"""Some of the random orders of actions. `python -m tests.fuzz.orders` plays more of them."""

from dataclasses import replace

import pytest

from tests.fuzz.orders.case import Action, Leg, PlanChoice
from tests.fuzz.orders.draw import draw_case
from tests.fuzz.orders.runner import play, shrink


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_caller_does_the_state_is_that_of_the_unsharded_model(ranks, seed):
    case = draw_case(seed)
    wrong = play(case, ranks).wrong
    assert wrong is None, f"{wrong}\n{case}"


def test_a_write_that_the_oracle_does_not_know_of_is_found_and_nothing_else_is_left(ranks):
    evaluate, tamper = Action(0, "evaluate"), Action(1, "tamper", {"name": "norm.weight"}, look="state_dict")
    plan = PlanChoice("zero2", accumulate=2)
    case = replace(draw_case(0), legs=(Leg(2, plan, (evaluate, tamper, replace(evaluate, index=2))),))
    found = play(case, ranks).wrong
    assert "tamper" in found
    assert "norm.weight is" in found
    short, _ = shrink(case, found, ranks)
    assert short.legs == (Leg(2, replace(plan, accumulate=1), (tamper,)),)
