"""Which functions save and load a state: those that the engine which made it has registered."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from fullshard.base.errors import FullshardError


@runtime_checkable
class EngineState(Protocol):
    """Anything that an engine's `shard` returned."""

    engine: ClassVar[str]  # "torch" or "jax"


@dataclass(frozen=True)
class StateFiles:
    """What an engine's states are saved and loaded by."""

    save: Callable[..., str]
    load: Callable[..., Any]


_REGISTERED: dict[str, StateFiles] = {}


def register(engine: str, save: Callable[..., str], load: Callable[..., Any]) -> None:
    """Called by an engine when it is imported: before it can have made a state."""
    _REGISTERED[engine] = StateFiles(save, load)


def files_of(state: EngineState) -> StateFiles:
    """What saves and loads this state. Raises a sentence where no engine of this process made it."""
    files = _REGISTERED.get(state.engine)
    if files is None:
        known = " or ".join(f"`fullshard.on_{name}.shard`" for name in sorted(_REGISTERED)) or "`shard`"
        raise FullshardError(f"this state is of engine {state.engine!r}, which is not loaded; give a state that {known} returned")
    return files
