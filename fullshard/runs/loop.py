"""The training loop, as a generator: the caller owns what happens between steps."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from fullshard.errors import FullshardError, checked_call

if TYPE_CHECKING:  # the engine is the caller's: this module imports no torch of its own
    from fullshard.on_torch import State, StepResult
    from fullshard.on_torch.loss import LossFunction


@checked_call("fullshard.train(state, batches, steps=1000), where batches gives a list of dicts a step", steps=int)
def train(
    state: "State",
    batches: "Iterable[list[dict]]",
    *,
    steps: int,
    loss: "LossFunction | None" = None,
    clip: float | None = None,
    lr: Callable[[int], float] | None = None,
) -> "Iterator[StepResult]":
    """Train for `steps` steps, yielding each step's result.

    `batches` gives, for this rank, one list of micro-batches a step; `loss` is the plain one unless given; `lr`
    is the learning rate of step 0, 1, …. The result's tensors are still on the device: reading one waits for
    the step.
    """
    from fullshard.on_torch import summed_loss, train_step

    source = iter(batches)
    for index in range(steps):
        micro_batches = next(source, None)
        if micro_batches is None:
            raise FullshardError(f"the data ended after {index} of {steps} steps; give more, or ask for {index} steps")
        yield train_step(state, micro_batches, loss=loss or summed_loss, clip=clip, lr=lr(index) if lr else None)
