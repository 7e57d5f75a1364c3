"""Some of the random orders of actions. `python -m tests.fuzz.orders` plays more of them."""

from dataclasses import replace

import pytest

from tests.fuzz.orders.case import Action, Case, Leg, PlanChoice
from tests.fuzz.orders.draw import draw_case
from tests.fuzz.orders.runner import play, shrink


def beginning(case: Case) -> Case:
    """Two thirds of the actions of each leg: `python -m tests.fuzz.orders` plays them all."""
    legs = [replace(leg, actions=leg.actions[: len(leg.actions) * 2 // 3]) for leg in case.legs]
    return replace(case, legs=tuple(legs))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_caller_does_the_state_is_that_of_the_unsharded_model(ranks, seed):
    case = beginning(draw_case(seed))
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


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_parameters_are_masters_after_a_backward_of_ones_own_that_raised(ranks, strategy):
    look = Action(0, "read_twice", {"reader": "values"})
    fails = {"loop": "own", "place": "block 0", "backward": True, "error": "fault", "micro": 0, "loss": "summed"}
    actions = (look, Action(1, "failing_step", fails, look="parameters"))
    case = replace(draw_case(0), compute="bf16", attached=False, legs=(Leg(2, PlanChoice(strategy), actions),))
    assert play(case, ranks).wrong is None
