"""A step that is skipped changes nothing: weights, optimizer, statistics of batches and counters of dropout."""

import jax
import numpy as np
import pytest
from flax import nnx

import fullshard as fs
from fullshard import on_jax
from fullshard.on_jax.saving.state_arrays import plain
from fullshard.on_jax.step.evaluate import evaluate
from tests.jax.test_on_jax import FP32, class_loss


class Dropping(nnx.Module):
    """A network with statistics of batches and dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.out(self.dropout(self.norm(x)))


def arrays(state: on_jax.State) -> list[np.ndarray]:
    return [np.asarray(plain(x)) for x in jax.tree.leaves((state.params, state.moments, state.rest))]


@pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.full)])
def test_a_skipped_step_changes_nothing(remat):
    """The oracle is a state that never had the step."""
    draw = np.random.default_rng(0)
    good = [(draw.normal(size=(16, 8)).astype(np.float32), draw.integers(0, 3, 16)) for _ in range(4)]
    broken = (np.full_like(good[0][0], np.nan), good[0][1])
    shape = fs.Batch(2, 1, 2)
    plan = fs.zero3(on_jax.describe(Dropping), devices=8, batch=shape, precision=FP32, remat=remat)
    states = [on_jax.shard(Dropping, plan, fs.AdamW(lr=0.1)) for _ in range(2)]
    step = lambda state, *rows: on_jax.train_step(state, rows, loss=class_loss)
    [step(state, *good[:2]) for state in states]
    before = arrays(states[0])
    assert bool(step(states[0], good[2], broken).skipped)
    assert all(np.array_equal(a, b) for a, b in zip(before, arrays(states[0]), strict=True))
    assert np.isfinite(evaluate(states[0], [good[0]], loss=class_loss)["loss"])
    losses = [float(step(state, *good[2:]).loss) for state in states]
    assert losses[0] == losses[1]
    after = arrays(states[0])
    assert all(np.array_equal(a, b) for a, b in zip(after, arrays(states[1]), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
