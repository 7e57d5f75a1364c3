"""Plays cases on live ranks, and finds the shortest sequence of actions that is still wrong."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.cpu.ranks import RankError, Ranks
from tests.fuzz.orders.case import Case, Leg
from tests.fuzz.orders.leg import play_leg

GetRanks = Callable[[int], Ranks]


@dataclass(frozen=True)
class Result:
    """`wrong`: what was, or nothing. `refusals`: sentences by which the state said that it does not do something."""

    wrong: str | None
    refusals: tuple[str, ...] = ()


def play(case: Case, ranks: GetRanks) -> Result:
    refusals: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        for number, leg in enumerate(case.legs):
            try:
                found = ranks(leg.world).run(play_leg, case, number, directory)[0]
            except RankError as error:
                return Result(str(error).strip().splitlines()[-1], tuple(refusals))
            refusals += found["refusals"]
            if found["wrong"]:
                ranks(leg.world).stop()  # what went wrong may have left something behind
                return Result(found["wrong"], tuple(refusals))
            if not found["goes_on"]:
                break
    return Result(None, tuple(refusals))


def chosen(case: Case, indices: set[int]) -> Case:
    """The case with these actions alone. Legs without any after the last that has some are left out."""
    legs = [replace(leg, actions=tuple(a for a in leg.actions if a.index in indices)) for leg in case.legs]
    while len(legs) > 1 and not legs[-1].actions:
        legs.pop()
    return replace(case, legs=tuple(legs))


def shrink(case: Case, ranks: GetRanks) -> Case:
    """Leave out actions, one after the other from the last, as long as the case is wrong without them."""
    indices = {a.index for leg in case.legs for a in leg.actions}
    for index in sorted(indices, reverse=True):
        shorter = chosen(case, indices - {index})
        if play(shorter, ranks).wrong:
            indices.discard(index)
    return _plainer(chosen(case, indices), ranks)


def _plainer(case: Case, ranks: GetRanks) -> Case:
    """Set what a plan need not have back to its default."""
    for number in range(len(case.legs)):
        for name in ("homes", "activations", "remat", "tensor", "accumulate", "sync", "prefetch", "share", "backlog"):
            leg = case.legs[number]
            default = type(leg.plan)("zero3").__dict__[name]
            other = _with_leg(case, number, replace(leg, plan=replace(leg.plan, **{name: default})))
            if other != case and play(other, ranks).wrong:
                case = other
    return case


def _with_leg(case: Case, number: int, leg: Leg) -> Case:
    return replace(case, legs=(*case.legs[:number], leg, *case.legs[number + 1 :]))
