"""The seam between a run and the engine that carries its plan out. Knows no engine.

An `Engine` is five parts, each of a Protocol of its own; `fullshard.on_NAME.engine` holds one as `ENGINE`. Everything above the
engines (`runs`, `commands`) reaches them through `load_engine` or `engine_of` alone, so that the same run works on each.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.engine_state import EngineState
from fullshard.engine.machine import LocalMachine
from fullshard.engine.model import Models, ModelT
from fullshard.engine.ranks import Ranks
from fullshard.engine.saver import Saver
from fullshard.engine.trainer import StateT, Trainer
from fullshard.plan.engine_traits import TRAITS, EngineTraits, refuse_engine, refuse_unoffered

OfferedT = TypeVar("OfferedT")


@dataclass(frozen=True)
class Engine(Generic[ModelT, StateT]):
    """What a run asks of an engine. Its parts are modules."""

    name: str  # one of `engine_traits.ENGINES`
    ranks: Ranks
    model: Models[ModelT]
    trainer: Trainer[ModelT, StateT]
    saver: Saver[ModelT, StateT]
    machine: LocalMachine[StateT]

    @property
    def traits(self) -> EngineTraits:
        return TRAITS[self.name]

    def offered(self, part: OfferedT | None, key: str, spelled: str = "") -> OfferedT:
        """The part; raise where the engine has none, with the sentence that its traits have for the key."""
        if part is None:
            refuse_unoffered(self.name, key, spelled)
        assert part is not None, key
        return part


def load_engine(name: str, user: str = "") -> Engine[Any, Any]:
    """The engine of this name. Raises a sentence, which names `user`, where there is none or what it needs is not installed."""
    refuse_engine(name)
    try:
        found: Engine[Any, Any] = importlib.import_module(f"fullshard.on_{name}.engine").ENGINE
    except ImportError as error:
        raise FullshardError(f"{user or f'engine {name!r}'} needs {name} ({error}); pip install 'fullshard[{name}]'") from None
    return found


def engine_of(state: EngineState) -> Engine[Any, Any]:
    """The engine that made a state."""
    return load_engine(state.engine)
