"""The training loop, as a generator: the caller owns what happens between steps."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the engine is the caller's: this module imports no torch of its own
    from fullshard.on_torch import State, StepResult


def train(state: "State", batches: "Iterable[list[dict]]", *, steps: int, clip: float | None = None) -> "Iterator[StepResult]":
    """Train for `steps` steps, yielding each step's result.

    `batches` gives, for this rank, one list of micro-batches a step. The result's tensors are still on the
    device: reading one waits for the step.
    """
    from fullshard.errors import FullshardError
    from fullshard.on_torch import train_step

    source = iter(batches)
    for index in range(steps):
        micro_batches = next(source, None)
        if micro_batches is None:
            raise FullshardError(f"the data ended after {index} of {steps} steps; give more, or ask for {index} steps")
        yield train_step(state, micro_batches, clip=clip)
