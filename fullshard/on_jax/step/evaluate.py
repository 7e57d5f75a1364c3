"""The mean loss of a sharded model over held-out batches."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from fullshard.base.errors import FullshardError
from fullshard.on_jax.loss.losses import LossFunction, as_loss, summed_loss
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.step.train_step import placed


def evaluate(state: JaxState, batches: Iterable[Any], *, loss: LossFunction = summed_loss) -> dict[str, float]:
    """The mean `loss` over all that counts in all processes' batches, and the means of its metrics. Collective.

    Dropout and the like are off; the state is not changed.
    """
    if ("evaluate", loss) not in state.compiled:
        state.compiled["evaluate", loss] = _compile(state, loss)
    sums: Any = None
    for batch in batches:
        found = state.compiled["evaluate", loss](state.params, state.rest, placed(state, [batch]))
        sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
    if sums is None:
        raise FullshardError("evaluate got no batch; give at least one")
    sums = jax.device_get(sums)
    if not sums["loss"][1]:
        raise FullshardError("evaluate: no batch has anything that counts; mark the tokens that count in `labels`")
    means = {name: total / (count or 1.0) for name, (total, count) in sums.items()}
    return {name: float(mean) for name, mean in means.items()}


def _compile(state: JaxState, loss: LossFunction) -> Any:
    def sums(params: Any, rest: Any, batches: Any) -> dict[str, Any]:
        batch = jax.tree.map(lambda x: x[0], batches)
        model = state.merge(params, rest)
        model.eval()
        found = as_loss(loss(model, batch), batch)
        return {"loss": (found.sum, found.count), **found.metrics}

    return jax.jit(sums, out_shardings=state.shardings.everywhere())
