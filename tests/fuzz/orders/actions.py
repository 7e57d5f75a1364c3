"""What a caller does to a state, in each case to the oracle as well. `draw` picks an action and what it is called with.

An action that must leave the state as it was says nothing; one that changes it calls `play.changes()`.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch

from fullshard import on_torch
from tests.fuzz.orders.case import Action, PlanChoice
from tests.fuzz.orders.faults import ERRORS, PLACES, Trap
from tests.fuzz.orders.play import Play
from tests.fuzz.orders.subject import READERS

ACTIONS: dict[str, Callable[..., None]] = {}
WEIGHTS: dict[str, int] = {}
CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {}

IDLE = ((), (), (), (0,), (1,), (2,), (0, 1))  # blocks that a step does not use
CLIPS = (None, None, 0.2, 5.0)
LOSSES = ("summed", "counted")
NAMES = ("embed.weight", "blocks.0.up_proj.weight", "blocks.1.up_proj.bias", "blocks.2.norm.weight", "norm.weight")


def action(weight: int, **choices: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An action that is drawn so often, with these choices."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        ACTIONS[function.__name__], WEIGHTS[function.__name__], CHOICES[function.__name__] = function, weight, choices
        return function

    return add


def draw_action(draw: random.Random, index: int) -> Action:
    name = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    look = draw.choice([None] * 4 + list(READERS))
    return Action(index, name, {k: draw.choice(v) for k, v in CHOICES[name].items()}, look)


# -- steps -------------------------------------------------------------------------------------------------------


@action(8, clip=CLIPS, loss=LOSSES, idle=IDLE)
def train_step(play: Play, clip: float | None, loss: str, idle: tuple[int, ...]) -> None:
    play.train_step(clip=clip, loss=loss, idle=idle)


@action(6, clip=CLIPS, idle=IDLE, between=(None, None, "train", "eval"), again=(False, False, False, True))
def own_step(play: Play, clip: float | None, idle: tuple[int, ...], between: str | None, again: bool) -> None:
    """A step of the caller's own loop, with a forward before the update, or a second update after it."""
    play.backward(idle=idle)
    if between is not None:
        play.forward(gradients=False, training=between == "train", idle=())
    play.update(clip)
    if again:
        play.update(None)
    play.drop()


@action(
    5,
    loop=("train_step", "train_step", "own"),
    place=PLACES,
    backward=(False, True),
    error=tuple(ERRORS),
    micro=(0, 1),
    loss=LOSSES,
)
def failing_step(play: Play, loop: str, loss: str, **trap: Any) -> None:
    """A step that raises in the middle. A loop of one's own then clears the gradients."""
    trap["backward"] = trap["backward"] and trap["place"] != "before"
    trap["micro"] = min(trap["micro"], play.choice.accumulate - 1)
    found = Trap(**trap)
    if loop == "train_step":
        play.failing_step(found, loss)
    else:
        play.failing_backward(found)
    play.drop()


@action(3, kind=("loss", "activations", "overflow"), clip=CLIPS, loss=LOSSES)
def skipped_step(play: Play, kind: str, clip: float | None, loss: str) -> None:
    """A step whose gradient is not finite changes nothing."""
    play.skipped_step(kind, clip, loss)


@action(1, idle=IDLE)
def dropped_gradients(play: Play, idle: tuple[int, ...]) -> None:
    play.backward(idle=idle)
    play.drop()


@action(1)
def left_gradients(play: Play) -> None:
    play.backward(idle=())


# -- without a step ------------------------------------------------------------------------------------------------


@action(5, gradients=(False, True), training=(False, True, True), idle=IDLE)
def forward(play: Play, gradients: bool, training: bool, idle: tuple[int, ...]) -> None:
    play.forward(gradients=gradients, training=training, idle=idle)


@action(2)
def evaluate(play: Play) -> None:
    play.evaluate()


@action(3, reader=READERS)
def read_twice(play: Play, reader: str) -> None:
    """What is read does not depend on what was read before."""
    play.look(reader)
    play.look(reader)


# -- checkpoints -----------------------------------------------------------------------------------------------------


@action(4, reader=(None, *READERS))
def save(play: Play, reader: str | None) -> None:
    if reader is not None:
        play.look(reader)
    play.save()


@action(2, clip=CLIPS, loss=LOSSES)
def save_behind(play: Play, clip: float | None, loss: str) -> None:
    play.save_behind(lambda: play.train_step(clip=clip, loss=loss, idle=()))


@action(3, which=(-1, -1, 0, 1))
def load(play: Play, which: int) -> None:
    """An earlier checkpoint, into this state."""
    if play.saves:
        play.load(play.saves[which % len(play.saves)])


@action(1)
def move(play: Play, plan: PlanChoice) -> None:
    """Save, and go on with a new state, of another plan, that is loaded from it."""
    play.save()
    play.move(plan)


# -- reads and writes --------------------------------------------------------------------------------------------------


@action(2)
def keep_model(play: Play) -> None:
    shown = play.subject(lambda: play.state.model.state_dict())
    play.kept["model"] = {n: t.detach().clone() for n, t in shown.items()}, play.oracle.keep_model()


@action(2)
def put_model(play: Play) -> None:
    if "model" in play.kept:
        shown, kept = play.kept["model"]
        play.subject(lambda: play.state.model.load_state_dict({n: t.clone() for n, t in shown.items()}))
        play.changes()
        play.oracle.put(kept)


@action(2)
def keep_optimizer(play: Play) -> None:
    play.kept["optimizer"] = play.subject(play.copied_optimizer_state), play.oracle.keep_optimizer()


@action(2)
def put_optimizer(play: Play) -> None:
    if "optimizer" in play.kept:
        shown, kept = play.kept["optimizer"]
        own = copy.deepcopy(shown)  # torch takes the tensors of a state dict that fit as they are
        play.subject(lambda: play.state.optimizer.load_state_dict(own))
        play.changes()
        play.oracle.put(kept)


@action(4, how=("values", "values", "in place", "state dict"), name=NAMES, factor=(0.5, 1.25))
def write(play: Play, how: str, name: str, factor: float) -> None:
    """Change a parameter from outside."""
    play.subject(lambda: WRITES[how](play.state, name, factor))
    play.changes()
    with torch.no_grad():
        play.oracle.model.get_parameter(name).mul_(factor)


@torch.no_grad()
def _write_values(state: on_torch.State, name: str, factor: float) -> None:
    with state.values(changed=True) as values:
        values[name].mul_(factor)


@torch.no_grad()
def _write_in_place(state: on_torch.State, name: str, factor: float) -> None:
    dict(state.model.named_parameters())[name].mul_(factor)


@torch.no_grad()
def _write_state_dict(state: on_torch.State, name: str, factor: float) -> None:
    shown = state.model.state_dict()
    state.model.load_state_dict({name: shown[name] * factor}, strict=False)


WRITES = {"values": _write_values, "in place": _write_in_place, "state dict": _write_state_dict}


@action(1, name=NAMES, trained=(False, False, True))
def freeze(play: Play, name: str, trained: bool) -> None:
    """Turn a parameter's training off, or on again. Those that were never trained stay so."""
    own = play.oracle.model.get_parameter(name)
    if any(own is p for group in play.oracle.optimizer.param_groups for p in group["params"]):
        play.subject(lambda: dict(play.state.model.named_parameters())[name].requires_grad_(trained))
        own.requires_grad_(trained)


@action(0, name=NAMES)
def tamper(play: Play, name: str) -> None:
    """A write that the oracle does not know of. Never drawn: a test plants it, to see that it is found."""
    _write_values(play.state, name, 2.0)
