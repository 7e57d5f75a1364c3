"""XLA's numbers of a compiled step: its arguments are the sharded state and the batch, to the byte."""

import pytest

import fullshard as fs
from fullshard import FullshardError, on_jax
from fullshard.on_jax.model.built_in import NnxLlama
from tests.jax.test_on_jax import LR, ROWS, STRATEGIES, batch, llama, make_plan

BATCH = 2 * 4 * ROWS * 12  # input_ids and labels in int32
NUMBERS = 8  # learning rate and clipping


def quick(strategy: str):
    return strategy if strategy == "hybrid" else pytest.param(strategy, marks=pytest.mark.full)


@pytest.mark.parametrize("strategy", [quick(s) for s in STRATEGIES])
def test_arguments_are_the_state_and_the_batch(strategy):
    state = on_jax.shard(llama, make_plan(llama, strategy), fs.AdamW(lr=LR))
    found = on_jax.memory_analysis(state, [batch(0)])
    share = lambda unit: 1 if unit.layout == "replicated" else state.plan.mesh.shard
    numel = {u.name: u.numel for u in on_jax.describe(llama).units}
    params = sum(4 * numel[u.name] // share(u) for u in state.plan.units)
    assert found.arguments == (3 * params + 4 + BATCH // 8 + NUMBERS, 0)  # Adam counts steps in 4 bytes
    assert sum(found.held.values()) == sum(found.arguments)
    assert found.updated == 3 * params + 4  # the new state takes the old one's place
    assert found.temporaries[0] > 0
    assert found.flops > 0
    assert found.peak == sum((found.arguments[0], found.temporaries[0]))


def test_the_estimate_stands_beside_xla():
    make = lambda rngs: NnxLlama(fs.presets.preset("llama-nano"), rngs=rngs)
    plan = fs.zero3(on_jax.describe(make), devices=8, batch=fs.Batch(2, 16))
    state = on_jax.shard(make, plan, fs.AdamW(lr=LR))
    rows = {k: v[:16] for k, v in batch(0, 16).items()}
    rows = {k: v.repeat(2, 1)[:, :16] for k, v in rows.items()}
    found = on_jax.memory_analysis(state, [rows], loss=on_jax.chunked_loss, description=fs.presets.describe("llama-nano"))
    wanted = fs.presets.describe("llama-nano")
    assert found.estimate.at_rest["device"] == {"params": 4 * wanted.numel // 8, "optimizer": 8 * wanted.numel // 8}
    text = str(found)
    assert "the planner estimates" in text
    assert "XLA's temporaries on a CPU do not compare with it" in text
    with pytest.raises(FullshardError, match="this description has no costs"):
        on_jax.memory_analysis(state, [rows], description=on_jax.describe(make))
