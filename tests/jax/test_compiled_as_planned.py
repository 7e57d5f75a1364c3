"""The compiled first step is held against the plan: what contradicts it is refused, what is far off is noted with numbers."""

import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import fullshard as fs
from fullshard import FullshardError, on_jax
from fullshard.on_jax.step import compiled_check
from fullshard.runs.run import Run
from tests.jax.test_computed_as_planned import BATCH, DIM, LR, VOCABULARY, losses, sharded

LAYERS = 12


class Network(nnx.Module):
    """Layers of which the call does what `how` says."""

    def __init__(self, rngs, how):
        self.how, self.table = how, nnx.Embed(VOCABULARY, DIM, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, input_ids):
        return self.table.attend(self.how(self.blocks, self.table(input_ids)))


def in_turn(blocks, x):
    for block in blocks:
        x = x + jnp.tanh(block(x))
    return x


def outside(blocks, x):
    """Weights read outside the calls of their modules: XLA gathers each once and keeps it for backward."""
    for block in blocks:
        x = x + jnp.tanh(x @ block.kernel[...])
    return x


def thrice(blocks, x):
    return in_turn([block for block in blocks for _ in range(3)], x)


def everywhere(blocks, x):
    """All rows on every device."""
    rows = NamedSharding(jax.sharding.Mesh(jax.devices(), ("rows",)), PartitionSpec())
    for block in blocks:
        x = jax.lax.with_sharding_constraint(x + jnp.tanh(block(x)), rows)
    return x


def network(how) -> on_jax.State:
    return sharded(lambda rngs: Network(rngs, how))


def test_a_step_as_planned_has_no_notes_and_compiles_once():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    state = network(in_turn)
    compiled.clear()
    losses(state, 2)
    assert sum("backend_compile" in event for event in compiled) == 1
    assert state.notes == ()


def test_a_whole_gathered_copy_under_zero3_is_refused():
    state = network(outside)
    before = dict(state.params)
    with pytest.raises(FullshardError) as caught:
        losses(state, 1)
    assert "the plan frees gathered parameters and has 8.00 KiB of them at once, but the compiled step keeps 12.00 KiB" in str(
        caught.value
    )
    assert before == state.params


def test_what_is_moved_besides_is_noted():
    state = network(thrice)
    losses(state, 1)
    said = "the compiled step moves more than the plan's schedule: blocks.0 gathers 6.19 KiB, not 2.12 KiB, and 11 more, which"
    assert [note.startswith(said) for note in state.notes] == [True]


def test_work_that_every_device_does_is_noted():
    state = network(everywhere)
    losses(state, 1)
    (computed,) = (note for note in state.notes if note.startswith("each device computes "))
    own, share = map(float, re.findall(r"([\d.]+)K", computed)[:2])
    assert own > 2.5 * share
    assert "KiB): some layers compute all rows on every device" in computed


def test_micro_batches_free_what_they_gather():
    make = lambda rngs: Network(rngs, in_turn)
    plan = fs.zero3(on_jax.describe(make), devices=8, batch=fs.Batch(1, 8, 2), precision=fs.Precision(compute="fp32"))
    state = on_jax.shard(make, plan, fs.AdamW(lr=LR))
    on_jax.train_step(state, [BATCH, BATCH])
    assert state.notes == ()


def test_optimizer_state_that_lies_whole_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules[on_jax.shard.__module__], "parameter_of", lambda path: "")
    with pytest.raises(
        FullshardError,
        match=r"optimizer state .*mu.*: the plan leaves 2 of its 16 elements on a device, but the compiled step 16",
    ):
        losses(network(in_turn), 1)


def test_parameters_that_lie_whole_are_refused():
    state = network(in_turn)
    whole = dict.fromkeys(state.params, state.shardings.everywhere())
    with pytest.raises(FullshardError, match="the compiled step 1,024; this is a bug of fullshard"):
        compiled_check._refuse_whole(state, whole, state.moment_shardings)


def test_a_run_prints_what_its_first_step_notes():
    said = []
    first, bar = SimpleNamespace(ranks=SimpleNamespace(is_first=lambda: True)), SimpleNamespace(say=said.append)
    Run.tell_notes(SimpleNamespace(state=SimpleNamespace(notes=("known", "new")), told=("known",), engine=first, bar=bar))
    assert said == ["new"]
