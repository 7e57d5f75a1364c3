"""The training loop, as a generator: the caller owns what happens between steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fullshard.base.errors import FullshardError, checked_call
from fullshard.checkpoint.engine_state import EngineState
from fullshard.engine.engine import engine_of

CALL = "fullshard.train(state, batches, steps=1000), where batches gives a list of micro-batches a step"


@checked_call(CALL, state=EngineState, steps=int)
def train(
    state: EngineState,
    batches: Iterable[list[Any]],
    *,
    steps: int,
    loss: Any = None,
    clip: float | None = None,
    lr: Callable[[int], float] | None = None,
    flags: Callable[[], Sequence[bool]] | None = None,
    unit_norms: bool = False,
) -> Iterator[Any]:
    """Train for `steps` steps; yield each step's result, such as `on_torch.StepResult`.

    `batches` gives, for this rank, one list of micro-batches a step. `loss` is the engine's plain one unless given. `lr`
    returns the learning rate of step 0, 1, … of this call. `flags` is called before each step and returns what ranks
    shall agree on in it (see `train_step`). `unit_norms`: results have the gradient norm of each unit. The result's tensors are
    still on the device: reading one waits for the step.
    """
    options = {"clip": clip, **({"loss": loss} if loss else {}), **({"unit_norms": True} if unit_norms else {})}
    return _steps(state, batches, steps, options, lr, flags)


def _steps(
    state: EngineState,
    batches: Iterable[Any],
    steps: int,
    options: dict[str, Any],
    lr: Callable[[int], float] | None,
    flags: Callable[[], Sequence[bool]] | None,
) -> Iterator[Any]:
    step, source = engine_of(state).trainer.train_step, iter(batches)
    for index in range(steps):
        micro_batches = next(source, None)
        if micro_batches is None:
            raise FullshardError(f"the data ended after {index} of {steps} steps; give more, or ask for {index} steps")
        yield step(state, micro_batches, lr=lr(index) if lr else None, flags=flags() if flags else (), **options)
