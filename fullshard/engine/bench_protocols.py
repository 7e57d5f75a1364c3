"""What a benchmark asks of an engine besides `fullshard.engine.engine.Engine`, as Protocols. Knows no engine.

An engine's module for this is `fullshard.on_NAME.bench_engine`. A measured program is a `Contestant`: a state of fullshard,
or a peer, which is the same model trained by another system. Both are timed by the same code.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from fullshard.base.errors import FullshardError, nearest
from fullshard.plan.engine_traits import refuse_engine
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan


@dataclass(frozen=True)
class CountedCollective:
    """A collective that ran, `times` times in a step. `nbytes`: of the whole tensor. Kinds are those of a schedule, and
    `broadcast`."""

    kind: str
    nbytes: int
    ranks: int
    times: int = 1


@dataclass(frozen=True)
class PeerRequest:
    """What a peer trains. `plan`: its units, precision, batch shape, remat and compile are taken over; how a peer shards is its
    own. `model`: without memory for its weights."""

    model: Any
    plan: Plan
    optimizer: Optimizer
    clip: float | None
    seed: int


class Contestant(Protocol):
    """A program that trains, ready for its first step. All functions are collective."""

    def step(self, micro_batches: Sequence[Any]) -> float:
        """One step, to its end. Returns the loss."""

    def collectives(self, micro_batches: Sequence[Any]) -> list[CountedCollective]:
        """What one more step communicates on this rank, counted from what really runs."""

    def reset_peak(self) -> None:
        """Finish pending updates, give cached memory back, and begin to count the peak anew."""

    def memory(self) -> dict[str, int]:
        """Peak bytes of this rank's device since then: `allocated` and `reserved`. Empty where the device has no count."""


class BenchEngine(Protocol):
    """The functions of an engine's module `bench_engine`."""

    PEERS: tuple[str, ...]

    def peer_fault(self, name: str) -> str | None:
        """Why this peer cannot run here, in a sentence; None if it can."""

    def make_peer(self, name: str, request: PeerRequest) -> Contestant:
        """Collective."""

    def make_contestant(self, state: Any, loss: Any, clip: float | None) -> Contestant:
        """The steps of a state that the engine's `shard` returned."""

    def flops(self, model: Any, sequence: int) -> tuple[float, float | None]:
        """Of a token in a training step, and the most that this rank's device does in a second of training by its maker; None
        if unknown."""

    @property
    def limit_memory(self) -> Callable[[int | None], None] | None:
        """Let this rank's device have no more than so many bytes; None lifts the limit. None where an engine cannot."""

    def hardware(self) -> str:
        """This rank's device, by name."""


def load_bench_engine(name: str) -> BenchEngine:
    """The benchmark's side of an engine. Raises a sentence where what it needs is not installed."""
    refuse_engine(name)
    try:
        return cast(BenchEngine, importlib.import_module(f"fullshard.on_{name}.bench_engine"))
    except ImportError as error:
        raise FullshardError(f"engine {name!r} needs {name} ({error}); pip install 'fullshard[{name}]'") from None


def refuse_peer(name: str, engine: str, known: Sequence[str]) -> None:
    """Raise where an engine has no peer of this name."""
    if name not in known:
        raise FullshardError(
            f"there is no peer {name!r} of the {engine} engine (known: {', '.join(known)}){nearest(name, list(known))}"
        )
