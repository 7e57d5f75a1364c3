"""A model of odd sizes under every strategy: what cannot be sharded stays whole and is listed, and the rest is sharded."""

from dataclasses import replace

import pytest

import fullshard as fs
from fullshard import on_jax
from fullshard.on_jax.model.built_in import NnxLlama
from tests.jax.test_on_jax import FP32, LLAMA, LR, STRATEGIES, batch

ODD = replace(LLAMA, vocab=63, dim=28, heads=7, kv_heads=7, ffn=40)


def odd(rngs):
    return NnxLlama(ODD, rngs=rngs)


def quick(strategy: str):
    return strategy if strategy in ("zero1", "hybrid") else pytest.param(strategy, marks=pytest.mark.full)


@pytest.mark.parametrize("strategy", [quick(s) for s in STRATEGIES])
def test_what_stays_whole_is_listed_with_the_reason(strategy):
    plan = fs.strategy(strategy, on_jax.describe(odd), **STRATEGIES[strategy], batch=fs.Batch(4, 12), precision=FP32)
    state = on_jax.shard(odd, plan, fs.AdamW(lr=LR))
    reasons: dict[str, int] = {}
    for name, array in state.params.items():
        meant = plan.unit_of(name).layout != "replicated"
        able = any(size % plan.mesh.shard == 0 for size in array.shape)
        assert array.sharding.is_fully_replicated == (not meant or not able), name
        if meant and not able:
            why = f"no dim of {'×'.join(map(str, array.shape))} is divisible by mesh.shard = {plan.mesh.shard}"
            reasons[why] = reasons.get(why, 0) + 1
    assert len(state.notes) == len(reasons)
    for why, count in reasons.items():
        (note,) = [n for n in state.notes if n.endswith(f"stays whole on every device: {why}")]
        assert (f" and {count - 1} more " in note) == (count > 1)
    assert bool(reasons) == (strategy not in ("ddp", "hybrid"))


def test_odd_sizes_train_as_on_one_device():
    losses = {}
    for devices in (1, 8):
        plan = fs.zero3(on_jax.describe(odd), devices=devices, batch=fs.Batch(32 // devices, 12), precision=FP32)
        state = on_jax.shard(odd, plan, fs.AdamW(lr=LR))
        rows = {k: v % 63 if k == "input_ids" else v.clip(max=62) for k, v in batch(0).items()}
        losses[devices] = [float(on_jax.train_step(state, [rows]).loss) for _ in range(3)]
    assert losses[8] == pytest.approx(losses[1], rel=1e-6)
