"""Homes on JAX: what rests on the host equals what rests on the device. Savings are seen only in programs for a GPU."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import fullshard as fs
from fullshard import FullshardError, on_jax
from fullshard.on_jax.offload import memory_kinds
from tests.jax.test_on_jax import LR, batch, llama, make_plan, train

OPTIMIZER = fs.Home(optimizer="host")
STATE = fs.Home(params="host", optimizer="host")
EVERYTHING = fs.Home("host", "host", "host")
ACTIVATIONS = fs.Home(activations="host")


@pytest.fixture(scope="module")
def resident():
    known: dict = {}

    def get(strategy: str, accumulate: int, **choices):
        key = (strategy, accumulate, *sorted(choices.items()))
        if key not in known:
            losses, state = train(llama, make_plan(llama, strategy, accumulate, **choices), steps=3)
            known[key] = losses, {n: np.asarray(p) for n, p in state.params.items()}
        return known[key]

    return get


QUICK = [("zero3", "full", 2, EVERYTHING)]
GRID = [
    pytest.param(s, r, a, h, marks=() if (s, r, a, h) in QUICK else pytest.mark.full)
    for s in ("ddp", "zero1", "zero2", "zero3", "hybrid")
    for r in ("none", "selective", "full")
    for a in (1, 2)
    for h in (OPTIMIZER, STATE, ACTIVATIONS, EVERYTHING)
]


@pytest.mark.parametrize(("strategy", "remat", "accumulate", "home"), GRID, ids=str)
def test_a_home_on_the_host_changes_nothing_but_rounding(resident, strategy, remat, accumulate, home):
    wanted, values = resident(strategy, accumulate, remat=remat)
    found, state = train(llama, make_plan(llama, strategy, accumulate, remat=remat, home=home), steps=3)
    # Not to the bit: the barriers that order copies keep XLA from fusing across them, which changes how sums are rounded. The
    # mean counts: Adam enlarges the rounding of gradients near zero, so that single values are up to 2e-6 of the largest apart.
    assert found == pytest.approx(wanted, rel=1e-6)
    for name, value in values.items():
        assert np.abs(value - np.asarray(state.params[name])).mean() <= 1e-6 * np.abs(value).mean(), name
    assert on_jax.compilations(state) == 1
    kinds = {p.sharding.memory_kind for p in state.params.values()}
    assert kinds == {"pinned_host" if home.params == "host" else "device"}


def test_bytes_of_device_and_host():
    plan = make_plan(llama, "zero3").change("model.layers.*", home=STATE).change("head", home=OPTIMIZER)
    state = on_jax.shard(llama, plan, fs.AdamW(lr=LR))
    on_jax.train_step(state, [batch(0)])
    own = {u.name: 4 * u.numel // 8 for u in on_jax.describe(llama).units}
    blocks = own["model.layers.0"] + own["model.layers.1"]
    assert state.held_bytes("device") == {"params": own["embed"] + own["head"], "optimizer": 2 * own["embed"] + 4}
    assert state.held_bytes("host") == {"params": blocks, "optimizer": 2 * (blocks + own["head"])}


PLACED = re.compile(r'annotate_device_placement\(.*_xla_buffer_placement = "pinned_host".*-> (tensor<\S+>)')


def test_the_step_moves_what_the_plan_says():
    """Counted in the program that XLA gets for a GPU: under full remat, each of two blocks sends its input to the host. State
    that rests there is sent once more, after its update."""
    sent = {}
    for home in (fs.Home(), ACTIVATIONS, EVERYTHING):
        state = on_jax.shard(llama, make_plan(llama, "zero3", remat="full", home=home), fs.AdamW(lr=LR))
        sent[home] = PLACED.findall(on_jax.lowered_step(state, [batch(0)], platform="cuda").as_text())
    assert sent[fs.Home()] == []
    assert sent[ACTIVATIONS] == ["tensor<32x12x32xf32>"] * 2
    arrays = [*state.params.values(), *jax.tree.leaves(state.moments)]
    assert len(sent[EVERYTHING]) >= 2 + len([a for a in arrays if a.ndim])


def test_a_state_in_the_wrong_memory_is_found():
    state = on_jax.shard(llama, make_plan(llama, "zero3", home=OPTIMIZER), fs.AdamW(lr=LR))
    name = "lm_head.weight"
    state.params[name] = jax.device_put(state.params[name], state.params[name].sharding.with_memory_kind("pinned_host"))
    with pytest.raises(FullshardError, match=r"lm_head.weight is in pinned_host memory, but the plan says device"):
        state.check()


def test_a_parameter_on_the_host_that_is_read_outside_its_unit():
    state = on_jax.shard(llama, make_plan(llama, "zero3", home=STATE), fs.AdamW(lr=LR))

    def loss(model, batch):
        return on_jax.Loss(on_jax.summed_loss(model, batch).sum + (model.lm_head.weight[...] ** 2).sum(), 1.0)

    with pytest.raises(FullshardError, match="is read outside the calls of its unit's modules"):
        on_jax.train_step(state, [batch(0)], loss=loss)


def test_homes_that_jax_cannot_honour(monkeypatch):
    described = on_jax.describe(llama)
    shard = lambda home, optimizer=None, **more: on_jax.shard(
        llama, replace(make_plan(llama, "zero3", home=home), **more), optimizer or fs.AdamW(lr=LR)
    )
    whole = make_plan(llama, "zero3")
    root = fs.Plan(whole.mesh, (fs.Unit("root", ("",), home=ACTIVATIONS),), batch=whole.batch)
    cases = {
        "unit embed: home.optimizer = 'disk': only the torch engine has it": lambda: shard(fs.Home(optimizer="disk")),
        "staging = 8 has no effect on JAX": lambda: shard(OPTIMIZER, staging=8),
        "cpu_share = 0.5 has no effect on JAX": lambda: shard(OPTIMIZER, cpu_share=0.5),
        "home.optimizer = 'host' has no effect: SGD": lambda: shard(OPTIMIZER, fs.SGD(lr=0.1)),
        "not for the whole of it": lambda: on_jax.shard(llama, root),
    }
    for sentence, call in cases.items():
        with pytest.raises(FullshardError) as caught:
            call()
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)
    device = SimpleNamespace(platform="abacus", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    with pytest.raises(FullshardError, match=r"home.params = 'host': JAX has no pinned_host memory on abacus; write 'device'"):
        memory_kinds.refuse_homes(fs.zero3(described, devices=8, home=STATE), device)
    memory_kinds.refuse_homes(fs.zero3(described, devices=8), device)
