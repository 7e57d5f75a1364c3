"""Weights and checkpoints as files: formats, bytes and names. Knows neither torch nor jax.

`save` and `load` go through the state, which knows its engine.
"""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fullshard.errors import checked_call


@runtime_checkable
class Saveable(Protocol):
    """What an engine's state can do."""

    def save_checkpoint(self, shelf: str | Path, **about: Any) -> str: ...

    def load_checkpoint(self, where: str | Path, **options: Any) -> Any: ...


@checked_call("checkpoint.save('run/checkpoints', state)", shelf=(str, Path), state=Saveable)
def save(shelf: str | Path, state: Saveable, **about: Any) -> str:
    """Write a checkpoint of `state` into the directory `shelf`, named after its step; where it lies. Collective.

    Returns when the checkpoint is whole and durable. `about`: `cursor` (samples taken of the data), `recipe`, `extra`
    (a JSON table of your own), `metrics` (numbers that retention may rank by), `overwrite` (replace another state of the
    same step, which is refused otherwise).
    """
    return state.save_checkpoint(shelf, **about)


@checked_call("checkpoint.load('run/checkpoints', state)", where=(str, Path), state=Saveable)
def load(where: str | Path, state: Saveable, **options: Any) -> Any:
    """Fill `state` from a checkpoint, or from the newest of a shelf; its `Manifest`. Collective.

    The state may have another plan, on another number of ranks. Everything is verified first, and whatever is missing,
    extra or of another shape or dtype is an error that lists it; `allow_missing` takes patterns of names that may be.
    """
    return state.load_checkpoint(where, **options)
