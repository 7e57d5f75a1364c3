"""Weights and checkpoints as files: formats, bytes and names. Knows neither torch nor jax.

`save` and `load` ask the engine that made the state.
"""

from pathlib import Path
from typing import Any

from fullshard.base.errors import checked_call
from fullshard.checkpoint.directories import Place
from fullshard.checkpoint.engine_state import EngineState, files_of


@checked_call("checkpoint.save('run/checkpoints', state)", checkpoint_dir=(str, Path), state=EngineState)
def save(checkpoint_dir: str | Path, state: EngineState, **about: Any) -> str:
    """Write a checkpoint of `state` into the directory `checkpoint_dir`, named after its step. Returns where it lies. Collective.

    Returns when the checkpoint is whole and durable. `about`: `cursor` (samples taken of the data), `recipe`, `extra`
    (a JSON table of your own), `metrics` (numbers that retention may rank by), `overwrite` (replace a checkpoint of the
    same step; refused otherwise).
    """
    return files_of(state).save(checkpoint_dir, state, **about)


@checked_call("checkpoint.load('run/checkpoints', state)", where=(str, Path, Place), state=EngineState)
def load(where: str | Path | Place, state: EngineState, **options: Any) -> Any:
    """Fill `state` from a checkpoint, or from the newest of a directory of them. Returns its `Manifest`. Collective.

    The state may have another plan, on another number of ranks. Every byte is verified first. A tensor that is missing,
    unexpected or of another shape or dtype is an error that lists it; `allow_missing` takes patterns of names that may be.
    """
    return files_of(state).load(where, state, **options)
