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
from fullshard.on_jax.parallelize.unit_calls import UnitCall
from fullshard.on_jax.step import compiled_check, train_step
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


# -- memory ------------------------------------------------------------------------------------------------------


WIDTH = 64


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Param(0.1 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...])


class Deep(nnx.Module):
    """Blocks that may be scanned, of whose weights there is much more than of activations."""

    def __init__(self, rngs):
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Wide(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, input_ids):
        return self.head(on_jax.scan_layers(self.blocks, self.table(input_ids)))


WHOLE = 4 * (LAYERS * WIDTH + 2 * VOCABULARY) * WIDTH / 1024  # KiB of all weights in fp32
FEW = {name: rows[:, :2] for name, rows in BATCH.items()}


def deep(strategy="zero3", accumulate=1, scan=True, **common) -> on_jax.State:
    shape, precision = fs.Batch(1, 2, accumulate), fs.Precision(compute="fp32")
    plan = fs.strategy(strategy, on_jax.describe(Deep), devices=8, batch=shape, precision=precision, **common)
    return on_jax.shard(Deep, plan, fs.AdamW(lr=LR), scan=scan)


def memory_notes(state) -> list[str]:
    on_jax.train_step(state, [FEW] * state.plan.batch.accumulate)
    return [note for note in state.notes if "floating-point" not in note and "moves more" not in note]


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(("remat", "keeps"), [("full", "inputs"), ("selective", "inputs and its matrix products")])
def test_a_unit_that_keeps_what_remat_frees_is_refused(monkeypatch, remat, keeps, scan):
    monkeypatch.setattr(UnitCall, "_policy", lambda self: None)  # all is kept
    name = "blocks.*" if scan else "blocks.0"
    with pytest.raises(FullshardError) as caught:
        memory_notes(deep(remat=remat, scan=scan))
    assert f"unit {name}: remat = {remat!r} keeps its {keeps} for backward, but the step keeps " in str(caught.value)


def test_an_old_state_beside_the_new_one_is_noted(monkeypatch):
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda *args, donate_argnums=(), **more: jit(*args, **more))
    state = deep()
    assert f"the compiled step has {3 * WHOLE / 8:.2f} KiB of the old state beside the new one" in memory_notes(state)[0]


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_copies_of_all_weights_are_noted(monkeypatch, strategy):
    """Six whole copies in fp32, for the time of the update: fewer may be XLA's scheduler on a CPU."""
    update = train_step.update_units

    def copying(shardings, transformation, grads, moments, homes, params, rate, skipped):
        whole = [jax.lax.with_sharding_constraint(p, shardings.everywhere()).ravel() for p in params.values()]
        lowest = [jnp.sort(jnp.concatenate(whole) * (rate + i))[0] for i in range(3)]
        stepped, changed = update(shardings, transformation, grads, moments, homes, params, rate, skipped)
        return {n: jnp.where(sum(lowest) == rate, 0, p) for n, p in stepped.items()}, changed

    assert memory_notes(deep(strategy, scan=False)) == []
    monkeypatch.setattr(train_step, "update_units", copying)
    (note,) = memory_notes(deep(strategy, scan=False))
    assert re.match(r"the compiled step needs 1.\d+ MiB besides its arguments, the plan at most .* \(gradients .* KiB, par", note)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_gradients_that_are_added_up_whole_are_noted(monkeypatch, strategy):
    assert memory_notes(deep(strategy, accumulate=2, scan=False)) == []
    state = deep(strategy, accumulate=2, scan=False)
    whole = lambda tree: jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, state.shardings.everywhere()), tree)
    scan = jax.lax.scan

    def carrying(body, begin, batches):
        def kept(sums, batch):
            sums, nothing = body(sums, batch)
            return whole(sums), nothing

        sums, nothing = scan(kept, whole(begin), batches)
        return whole(sums), nothing

    monkeypatch.setattr(jax.lax, "scan", carrying)
    assert memory_notes(state)[0] == (
        f"the compiled step has {WHOLE:.2f} KiB of whole parameters or gradients in memory from one micro-batch to the next, "
        f"which the plan frees or reduces: those of table.embedding and {LAYERS + 1} more"
    )


def test_a_run_prints_what_its_first_step_notes():
    said = []
    first, bar = SimpleNamespace(ranks=SimpleNamespace(is_first=lambda: True)), SimpleNamespace(say=said.append)
    Run.tell_notes(SimpleNamespace(state=SimpleNamespace(notes=("known", "new")), told=("known",), engine=first, bar=bar))
    assert said == ["new"]
