"""A step that raises before it runs changes nothing. After one that fails while it runs, the state says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fullshard as fs
from fullshard import FullshardError, on_jax
from tests.jax.test_computed_as_planned import BATCH, LR, Stock


def make_state() -> on_jax.State:
    """On one device: simulated ones would wait for the one that failed."""
    plan = fs.zero3(on_jax.describe(Stock), devices=1, batch=fs.Batch(8, 8), precision=fs.Precision(compute="fp32"))
    return on_jax.shard(Stock, plan, fs.AdamW(lr=LR))


def test_a_step_that_raises_leaves_nothing_behind():
    """The oracle is a state that never had the step."""
    states = [make_state() for _ in range(2)]
    [on_jax.train_step(state, [BATCH]) for state in states]

    def broken(model, batch):
        on_jax.summed_loss(model, batch)
        raise ValueError("the loss of a user")

    with pytest.raises(ValueError, match="the loss of a user"):
        on_jax.train_step(states[1], [BATCH], loss=broken)
    with pytest.raises(FullshardError, match="2 micro-batches, but"):
        on_jax.train_step(states[1], [BATCH, BATCH])
    assert states[1].step == 1
    losses = [float(on_jax.train_step(state, [BATCH]).loss) for state in states]
    assert losses[0] == losses[1]
    for name, value in states[0].params.items():
        assert np.array_equal(value, states[1].params[name]), name


def test_a_step_that_fails_while_it_runs_tears_the_state():
    fails = []

    def look(x):
        if fails:
            raise ValueError("on the host")
        return np.float32(0)

    def watched(model, batch):
        found = on_jax.summed_loss(model, batch)
        seen = jax.pure_callback(look, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(found.sum))
        return on_jax.Loss(found.sum + seen, found.count)

    state = make_state()
    assert float(on_jax.train_step(state, [BATCH], loss=watched).loss) > 0
    fails.append(True)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="on the host"):
        float(on_jax.train_step(state, [BATCH], loss=watched).loss)
    fails.clear()
    with pytest.raises(FullshardError, match=r"a step failed while it ran, .* load the last checkpoint"):
        on_jax.train_step(state, [BATCH], loss=watched)
