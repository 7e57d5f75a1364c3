"""How an engine trains: sharding a model, loading batches, losses and steps. Knows no engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fullshard.checkpoint.engine_state import EngineState
from fullshard.engine.loss_value import LossFunction
from fullshard.engine.model import ModelT_contra
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan

if TYPE_CHECKING:
    from fullshard.data.step_batches import BatchLoader

StateT = TypeVar("StateT")  # what the engine's `shard` returns


class RunState(EngineState, Protocol):
    """What a run reads of a state. A step changes it in place."""

    step: int  # steps done
    plan: Plan
    model: Any
    notes: tuple[str, ...]  # what a user should know of how it was made

    @property
    def compiles(self) -> bool:
        """True if the first step takes the time that compiling does."""

    @property
    def kernels(self) -> Mapping[str, str]:
        """Which kernels update offloaded units, by lane. Empty where none is offloaded."""

    @property
    def wire_errors(self) -> Mapping[str, float]:
        """Relative errors of quantised gathers and reductions in the first step. Empty where they are plain."""

    @property
    def updates_overlap(self) -> bool:
        """True if updates of one step may still run during the next."""


class Step(Protocol):
    """The result of one training step. Its numbers may still be on the device."""

    @property
    def index(self) -> int:
        """Of the step, counted from 1."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Means that the loss function named. The values may still be on the device."""

    @property
    def unit_norms(self) -> Mapping[str, Any]:
        """Gradient norms by unit, if they were asked for. The values may still be on the device."""

    def numbers(self) -> list[float]:
        """loss, gradient norm, count, skipped, then one number per flag, metric and unit norm. Waits for the device once."""

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase on this rank's device."""


class Trainer(Protocol[ModelT_contra, StateT]):
    """Trains a state. Collective functions are called by every rank. A batch is any tree of arrays that the loss reads. What not
    every engine offers is None where it does not."""

    @property
    def refuse_batch(self) -> Callable[[ModelT_contra, LossFunction, Any], None] | None:
        """Raise where the model cannot be called with such a batch, as far as an engine knows that before ranks start."""

    def shard(
        self,
        model: ModelT_contra,
        plan: Plan,
        optimizer: Optimizer | None = None,
        *,
        seed: int = 0,
        weights: str | Path | None = None,
        disk: str | Path | None = None,
    ) -> StateT:
        """Carry the plan out on the model. `seed`: of what is drawn, and of the random numbers of training, of which each data
        rank has a stream of its own. A checkpoint restores these. Collective."""

    def loader(self, workers: int, prefetch: int, *, seed: int = 0, threads: bool = True) -> "BatchLoader":
        """Loads batches ahead. `threads`: whether a thread may read the data."""

    def collate(self, samples: Sequence[Any]) -> Any:
        """Samples of equal shapes as one batch: a tree of stacked tensors."""

    def seeded(self, seed: int, i: int) -> AbstractContextManager[None]:
        """A context in which random numbers depend on `seed` and `i` alone."""

    def named_loss(self, name: str) -> LossFunction:
        """The loss called `plain` or `chunked`, an objective's, `file.py:callable`, or `call`: that of the model's own call."""

    def refuse_loss(self, model: ModelT_contra, name: str) -> None:
        """Raise if the model is not trained with the loss of this name."""

    def train_step(
        self,
        state: StateT,
        micro_batches: Sequence[Any],
        *,
        loss: LossFunction = ...,
        clip: float | None = None,
        lr: float | None = None,
        flags: Sequence[bool] = (),
        unit_norms: bool = False,
    ) -> Step:
        """Forward, backward and update. `flags` are combined over ranks with the step's own sums. `unit_norms`: the result has
        the gradient norm of each unit. Collective."""

    def evaluate(self, state: StateT, batches: Iterable[Any], *, loss: LossFunction = ...) -> dict[str, float]:
        """The mean `loss` over all that counts in all ranks' batches, and the means of its metrics. Collective."""

    def generate(
        self,
        model: Any,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        stop: int | None = None,
        seed: int = 0,
        window: int | None = None,
    ) -> list[int]:
        """Continue a prompt with a state's `model`. Collective."""
