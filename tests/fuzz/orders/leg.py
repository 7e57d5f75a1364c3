"""One leg of a case, inside ranks."""

import functools
import gc
import traceback
from typing import Any

from tests.fuzz.orders.actions import ACTIONS
from tests.fuzz.orders.case import Action, Case
from tests.fuzz.orders.play import Ended, Play, Refused, Wrong


def play_leg(case: Case, number: int, directory: str) -> dict[str, Any]:
    """What was wrong, if anything was, what was refused, and whether the case goes on."""
    refusals: list[str] = []
    _forget_modules()
    try:
        _play(case, number, directory, refusals)
    except Wrong as wrong:
        return {"wrong": str(wrong), "refusals": refusals, "goes_on": False}
    except Ended as ended:
        return {"wrong": None, "refusals": [*refusals, str(ended)], "goes_on": False}
    finally:
        gc.collect()
    return {"wrong": None, "refusals": refusals, "goes_on": True}


@functools.cache
def _forget_modules() -> None:
    """What is there before the first state is never garbage: collections after each state would go through it."""
    gc.collect()
    gc.freeze()


def _play(case: Case, number: int, directory: str, refusals: list[str]) -> None:
    play = Play(case, number, directory)
    for action in case.legs[number].actions:
        try:
            _do(play, action, refusals)
        except Wrong as wrong:
            raise Wrong(f"{action}: {wrong}") from None
        except Ended:
            raise
        except Exception as error:
            raise RuntimeError(f"{action}: {_told(error)}") from None
    try:
        play.look("values")
    except Refused as refusal:  # the last step has torn the state, and the last checkpoint is loaded now
        refusals.append(f"at the end: {refusal}")
        play.look("values")
    if number < len(case.legs) - 1:
        play.leave(number)


def _told(error: Exception) -> str:
    """The last lines of the package that it came through, and what it says."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/tests/" not in f.filename]
    lines = [
        f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames if "fullshard" in f.filename or f is frames[-1]
    ]
    return " > ".join([*lines[-4:], f"{type(error).__name__}: {error}"])


def _do(play: Play, action: Action, refusals: list[str]) -> None:
    play.action = action
    try:
        ACTIONS[action.name](play, **action.choices)
        if action.look:
            play.look(action.look)
    except Refused as refusal:
        refusals.append(f"{action.name}: {refusal}")
        play.drop()
