"""Plays cases on live ranks, and finds the shortest sequence of actions that is still wrong."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from tests.cpu.ranks import RankError, Ranks
from tests.fuzz.orders.case import Case, PlanChoice
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
                return Result(_last_words(str(error)), tuple(refusals))
            refusals += found["refusals"]
            if found["wrong"]:
                return Result(found["wrong"], tuple(refusals))
            if not found["goes_on"]:
                break
    return Result(None, tuple(refusals))


def _last_words(error: str) -> str:
    """The last line of a traceback, and all of what a dead rank left."""
    return error if "died with exit code" in error else error.strip().splitlines()[-1]


def chosen(case: Case, indices: set[int]) -> Case:
    """The case with these actions alone. Legs without any after the last that has some are left out."""
    legs = [replace(leg, actions=tuple(a for a in leg.actions if a.index in indices)) for leg in case.legs]
    while len(legs) > 1 and not legs[-1].actions:
        legs.pop()
    return replace(case, legs=tuple(legs))


def shrink(case: Case, wrong: str, ranks: GetRanks) -> tuple[Case, str]:
    """Leave out actions, one after the other from the last, and set what plans need not have back to its default, as long as the
    case is wrong without. Returns what is left, and what is wrong with it."""
    for shorter in _without_action, _with_default:
        for change in shorter(case):
            other = change(case)
            found = play(other, ranks).wrong if other != case else None
            if found:
                case, wrong = other, found
    return case, wrong


Change = Callable[[Case], Case]


def _without_action(case: Case) -> list[Change]:
    indices = sorted((a.index for leg in case.legs for a in leg.actions), reverse=True)
    return [
        lambda case, index=index: chosen(case, {a.index for leg in case.legs for a in leg.actions} - {index}) for index in indices
    ]


def _with_default(case: Case) -> list[Change]:
    defaults = {f.name: f.default for f in fields(PlanChoice) if f.name != "strategy"}
    numbers = range(len(case.legs))
    return [lambda case, n=n, k=k, v=v: _change_plan(case, n, k, v) for n in numbers for k, v in defaults.items()]


def _change_plan(case: Case, number: int, name: str, value: object) -> Case:
    legs = list(case.legs)
    legs[number] = replace(legs[number], plan=replace(legs[number].plan, **{name: value}))
    return replace(case, legs=tuple(legs))
