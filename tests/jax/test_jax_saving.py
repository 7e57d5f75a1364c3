"""Checkpoints of the JAX engine: the torch engine's format, both ways; from any mesh to any other; verified, atomic."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import save_file
from typer.testing import CliRunner

import fullshard as fs
from fullshard import FullshardError, on_jax
from fullshard.checkpoint import commit, lease
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.other_formats.import_weights import import_weights
from fullshard.checkpoint.reader import open_checkpoint
from fullshard.checkpoint.retention import Retention
from fullshard.checkpoint.verify import problems
from fullshard.checkpoint.writer import TensorSource, write_checkpoint
from fullshard.commands.cli import app
from fullshard.model.presets import PRESETS
from fullshard.on_jax import saving
from fullshard.on_jax.model.built_in import NnxGPT, NnxLlama
from fullshard.on_jax.saving.state_arrays import state_arrays
from tests.cpu.ranks import Ranks
from tests.jax import torch_side
from tests.jax.test_on_jax import FP32, GPT, LLAMA, LR, ROWS, Classifier, batch, class_loss, llama

CLIP, HALF, STEPS = 0.5, 4, 8
ADAMW = fs.AdamW(lr=LR, weight_decay=0.01)
BATCHES = [batch(i % 3) for i in range(STEPS)]


def make_state(make=llama, optimizer=ADAMW, devices: int = 8, seed: int = 0, strategy: str = "zero3", **options):
    shape = fs.Batch(ROWS // devices, 12)
    plan = fs.strategy(strategy, on_jax.describe(make), devices=devices, batch=shape, precision=FP32)
    return on_jax.shard(make, plan, optimizer, seed=seed, **options)


def train(state, batches) -> list[float]:
    return [float(on_jax.train_step(state, [b], clip=CLIP).loss) for b in batches]


def values(state) -> dict[str, np.ndarray]:
    return {name: np.asarray(value).copy() for name, value in state_arrays(state).items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def said(call) -> str:
    with pytest.raises(FullshardError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def trained():
    """A state after two steps, for tests that only save it."""
    state = make_state()
    train(state, BATCHES[:2])
    return state


# -- between the engines -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks():
    found = Ranks(2)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    directory = tmp_path_factory.mktemp("weights")
    state = on_jax.shard(llama, fs.ddp(on_jax.describe(llama), devices=1), seed=5)
    save_file({name: np.asarray(value) for name, value in state.params.items()}, directory / "model.safetensors")
    return str(directory)


@pytest.mark.parametrize(
    "optimizer",
    [ADAMW, *(pytest.param(o, marks=pytest.mark.full) for o in (fs.SGD(lr=0.3, momentum=0.9, nesterov=True), fs.Adam(lr=LR)))],
    ids=lambda o: type(o).__name__,
)
def test_a_run_goes_on_in_the_other_engine(ranks, weights, tmp_path, optimizer):
    state = make_state(optimizer=optimizer, devices=4, weights=weights)
    wanted = train(state, BATCHES[:HALF])
    saving.save_checkpoint(tmp_path / "jax", state, cursor=77)
    wanted += train(state, BATCHES[HALF:])
    assert wanted[-1] < wanted[0] - 0.1

    on_torch = ranks.run(torch_side.resume, LLAMA, optimizer, BATCHES, CLIP, str(tmp_path / "jax"))[0]
    assert on_torch["losses"] == pytest.approx(wanted[HALF:], abs=1e-5)
    assert (on_torch["cursor"], on_torch["step"]) == (77, STEPS)

    ranks.run(torch_side.save, LLAMA, optimizer, BATCHES, CLIP, str(tmp_path / "torch"), HALF, weights)
    again = make_state(optimizer=optimizer, devices=4, seed=9)
    manifest = saving.load_checkpoint(tmp_path / "torch", again)
    assert (manifest.cursor, manifest.state["extra"], again.step) == (100 + HALF, {"from": "torch"}, HALF)
    assert train(again, BATCHES[HALF:]) == pytest.approx(wanted[HALF:], abs=1e-5)
    assert on_jax.compilations(again) == 1

    jax_names, torch_names = (set(open_checkpoint(tmp_path / d).manifest.tensors) for d in ("jax", "torch"))
    assert jax_names == {n for n in torch_names if not n.startswith("rng.")}


@pytest.mark.full
def test_saved_before_the_first_step(ranks, weights, tmp_path):
    state = make_state(devices=2, weights=weights)
    saving.save_checkpoint(tmp_path / "jax", state, cursor=0)
    wanted = train(state, BATCHES[:2])
    on_torch = ranks.run(torch_side.resume, LLAMA, ADAMW, BATCHES[:2], CLIP, str(tmp_path / "jax"))[0]
    assert on_torch["losses"] == pytest.approx(wanted, abs=1e-5)
    ranks.run(torch_side.save, LLAMA, ADAMW, BATCHES, CLIP, str(tmp_path / "torch"), 0, weights)
    saving.load_checkpoint(tmp_path / "torch", state)
    assert state.step == 0
    assert train(state, BATCHES[:2]) == wanted


def test_generators_of_the_other_engine_are_seeded_anew(ranks, tmp_path):
    size = replace(GPT, dropout=0.3)
    make = lambda rngs: NnxGPT(size, rngs=rngs)
    ranks.run(torch_side.save, size, ADAMW, BATCHES, CLIP, str(tmp_path / "torch"), 1)
    states = [make_state(make, seed=seed) for seed in (0, 0, 1)]
    before = values(states[0])
    for state in states:
        saving.load_checkpoint(tmp_path / "torch", state)
    keys = [{n: v for n, v in values(s).items() if n.startswith("rng.")} for s in states]
    assert same(keys[0], keys[1])
    assert not any(np.array_equal(keys[0][n], keys[2][n]) for n in keys[0] if n.endswith(".key"))
    assert not any(np.array_equal(keys[0][n], before[n]) for n in keys[0] if n.endswith(".key"))
    saving.save_checkpoint(tmp_path / "jax", states[0])
    drawn = [found["drawn"] for found in ranks.run(torch_side.resume, size, ADAMW, BATCHES[:2], CLIP, str(tmp_path / "jax"))]
    assert drawn[0] != drawn[1]  # each data rank has a stream of its own
    assert drawn == [f["drawn"] for f in ranks.run(torch_side.resume, size, ADAMW, BATCHES[:2], CLIP, str(tmp_path / "jax"))]


def rewritten(source: Path, target: Path, change: dict[str, bytes], **state) -> Path:
    """A checkpoint with other bytes for some tensors."""
    found = open_checkpoint(source)
    sources = [
        TensorSource(n, t.dtype, t.shape, partial(lambda n: change.get(n, bytes(found.raw(n))), n))
        for n, t in found.manifest.tensors.items()
    ]
    return Path(str(write_checkpoint(Local(target), sources, step=found.manifest.step, state=found.manifest.state | state)))


def test_updates_that_differ_between_parameters_are_refused(tmp_path, trained):
    saving.save_checkpoint(tmp_path / "one", trained)
    name = "optimizer.model.norm.weight.step"
    other = rewritten(tmp_path / "one", tmp_path / "other", {name: np.float32(3).tobytes()})
    before = values(trained)
    sentence = said(lambda: saving.load_checkpoint(other, trained))
    assert "model.norm.weight had 3 updates" in sentence
    assert "resume on the torch engine" in sentence
    assert same(before, values(trained))


def test_a_parameter_without_optimizer_state_starts_from_zero(tmp_path, trained):
    saving.save_checkpoint(tmp_path / "one", trained)
    found, name = open_checkpoint(tmp_path / "one"), "model.norm.weight"
    sources = [
        TensorSource(n, t.dtype, t.shape, partial(found.raw, n))
        for n, t in found.manifest.tensors.items()
        if not n.startswith(f"optimizer.{name}.")
    ]
    write_checkpoint(Local(tmp_path / "other"), sources, step=2, state=found.manifest.state | {"without_slots": [name]})
    again = make_state(seed=3)
    saving.load_checkpoint(tmp_path / "one", again)
    assert np.asarray(again.moments[0].mu[name]).any()
    with pytest.warns(UserWarning, match=f"no optimizer state for {name}: it starts from zero"):
        saving.load_checkpoint(tmp_path / "other", again)
    assert not np.asarray(again.moments[0].mu[name]).any()
    wanted, have = values(trained), values(again)
    assert same(*({n: v for n, v in d.items() if name not in n} for d in (wanted, have)))


def test_frozen_parameters_have_no_optimizer_state(tmp_path):
    name, states = "model.norm.weight", [make_state(seed=seed) for seed in (0, 1)]
    for i, state in enumerate(states):
        frozen = optax.masked(optax.scale_by_adam(), {n: n != name for n in state.params})
        _, state.moments = frozen.update({n: p + 1 - i for n, p in state.params.items()}, frozen.init(state.params))
        state.moment_shardings = None
    saving.save_checkpoint(tmp_path, states[0])
    names = set(open_checkpoint(tmp_path).manifest.tensors)
    assert f"optimizer.{name}.exp_avg" not in names
    assert len(names) == 4 * len(states[0].params) - 3
    saving.load_checkpoint(tmp_path, states[1])
    assert same(values(states[0]), values(states[1]))
    assert f"it lacks optimizer.{name}.exp_avg" in said(lambda: saving.load_checkpoint(tmp_path, make_state()))


# -- from mesh to mesh ---------------------------------------------------------------------------------------------


def test_eight_four_eight_devices(tmp_path):
    state = make_state()
    train(state, BATCHES[:2])
    saving.save_checkpoint(tmp_path / "eight", state, cursor=32)
    before, wanted = values(state), train(state, BATCHES[2:4])
    four = make_state(devices=4, seed=1, strategy="zero2")
    saving.load_checkpoint(tmp_path / "eight", four)
    assert same(values(four), before)
    saving.save_checkpoint(tmp_path / "four", four)
    again = make_state(seed=2)
    saving.load_checkpoint(tmp_path / "four", again)
    assert same(values(again), before)
    assert train(again, BATCHES[2:4]) == wanted  # bit for bit
    assert on_jax.compilations(again) == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "options"), [("hybrid", {"replicate": 2, "shard": 2}), ("ddp", {"devices": 8})])
def test_every_part_is_written_once(tmp_path, strategy, options):
    described = on_jax.describe(llama)
    tensor = {"tensor": 2} if strategy == "hybrid" else {}
    plan = fs.strategy(strategy, described, **options, **tensor, batch=fs.Batch(ROWS // 4, 12), precision=FP32)
    state = on_jax.shard(llama, plan, ADAMW)
    train(state, BATCHES[:1])
    place = saving.save_checkpoint(tmp_path, state)
    manifest = open_checkpoint(tmp_path).manifest
    numbers = sum(p.numel for u in described.units for p in u.parameters)
    tensors = sum(t.nbytes for t in manifest.tensors.values())
    assert tensors == 3 * 4 * numbers + 4 * len(state.params)  # weights, two moments, and the steps
    assert 0 < manifest.nbytes - tensors < 1 << 16  # the header
    assert problems(Local(Path(place))) == []
    again = make_state(seed=2)
    saving.load_checkpoint(tmp_path, again)
    assert same(values(again), values(state))


def test_what_rests_on_the_host_does_so_after_a_load(tmp_path, trained):
    home = fs.Home(params="host", optimizer="host")
    plan = fs.zero3(on_jax.describe(llama), devices=8, batch=fs.Batch(ROWS // 8, 12), precision=FP32, home=home)
    saving.save_checkpoint(tmp_path / "device", trained)
    state = on_jax.shard(llama, plan, ADAMW, seed=1)
    held = state.held_bytes("host")
    saving.load_checkpoint(tmp_path / "device", state)
    assert state.held_bytes("host") == held
    assert held["optimizer"] > held["params"] > 0
    assert same(values(state), values(trained))
    wanted = train(state, BATCHES[2:3])
    saving.save_checkpoint(tmp_path / "host", state)
    again = make_state(seed=2)
    saving.load_checkpoint(tmp_path / "device", again)
    assert train(again, BATCHES[2:3]) == pytest.approx(wanted, abs=1e-6)
    saving.load_checkpoint(tmp_path / "host", again)
    assert same(values(again), values(state))


def test_dropout_goes_on_bit_for_bit(tmp_path):
    make = lambda rngs: NnxGPT(replace(GPT, dropout=0.3), rngs=rngs)
    state = make_state(make)
    train(state, BATCHES[:2])
    saving.save_checkpoint(tmp_path, state)
    before, wanted = values(state), train(state, BATCHES[2:5])
    again = make_state(make, seed=7)
    saving.load_checkpoint(tmp_path, again)
    assert same(values(again), before)
    assert sum(n.startswith("rng.jax.") for n in before) > 2
    assert train(again, BATCHES[2:5]) == wanted


def test_statistics_of_batches(tmp_path):
    draw = np.random.default_rng(0)
    rows = (draw.normal(size=(16, 8)).astype(np.float32), draw.integers(0, 3, 16))
    states = [make_state(Classifier, fs.SGD(lr=0.1, momentum=0.9), seed=seed) for seed in (0, 1)]
    step = lambda state: float(on_jax.train_step(state, [rows], loss=class_loss).loss)
    [step(states[0]) for _ in range(3)]
    saving.save_checkpoint(tmp_path, states[0])
    saving.load_checkpoint(tmp_path, states[1])
    assert "model.norm.mean" in open_checkpoint(tmp_path).manifest.tensors
    statistics = [jax.tree.leaves(nnx.state(s.model, nnx.BatchStat)) for s in states]
    assert all(np.array_equal(a, b) for a, b in zip(*statistics, strict=True))
    assert step(states[0]) == step(states[1])
    states[0].rest["norm"]["mean"][...] = states[0].rest["norm"]["mean"][...].at[0].set(np.inf)
    found = said(lambda: saving.save_checkpoint(tmp_path / "infinite", states[0]))
    assert "the statistics in norm.mean are not finite" in found


class Masked(nnx.Module):
    """A linear layer whose outputs are masked by a variable."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.mask = nnx.Variable(jnp.where(jnp.tri(8) > 0, 0.0, -jnp.inf))

    def __call__(self, x):
        return self.linear(x) + self.mask[...]


def test_a_mask_may_be_infinite_but_not_nan(tmp_path):
    state = make_state(Masked, fs.SGD(lr=0.1))
    saving.save_checkpoint(tmp_path / "mask", state)
    state.rest["mask"][...] = state.rest["mask"][...].at[0, 0].set(np.nan)
    assert "the values in mask are NaN" in said(lambda: saving.save_checkpoint(tmp_path / "broken", state))


def test_scanned_weights_must_be_finite(tmp_path):
    state = make_state(scan=True)
    name = "model.layers.*.mlp.up_proj.weight"
    state.params[name] = state.params[name].at[1, 3, 3].set(np.nan)
    found = said(lambda: saving.save_checkpoint(tmp_path, state))
    assert "the weights in model.layers.1.mlp.up_proj.weight are not finite" in found


def test_weights_alone(tmp_path, trained):
    saving.save_checkpoint(tmp_path / "whole", trained)
    bare = make_state(optimizer=None, devices=2)
    saving.load_checkpoint(tmp_path / "whole", bare)
    assert same(bare.params, trained.params)
    with pytest.warns(UserWarning, match="has no optimizer"):
        saving.save_checkpoint(tmp_path / "bare", bare)
    expected = saving.weights_of(llama, bare.plan)
    records = open_checkpoint(tmp_path / "bare").manifest.tensors
    assert {n: (t.shape, t.dtype) for n, t in records.items()} == expected


# -- beside training -----------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """Files are written when the gate is opened."""
    opened, write = threading.Event(), Local.write

    def late(self, name, data, length=None):
        if name.startswith("shard-"):
            opened.wait(60)
        write(self, name, data, length)

    monkeypatch.setattr(Local, "write", late)
    return opened


def test_a_save_holds_the_old_values(tmp_path, gate):
    state = make_state()
    train(state, BATCHES[:1])
    writer = saving.checkpointer(tmp_path, state, keep=None, overlap=True, run="a test")
    before, first = values(state), writer.save(cursor=1)
    first.staged()
    train(state, BATCHES[1:3])
    assert not first.done()
    assert writer.names() == []
    gate.set()
    second = writer.save(cursor=3)
    assert first.done()  # the second has waited for it
    assert (first.result(), second.result()) == tuple(str(tmp_path / f"step-0000000{i}") for i in (1, 3))
    again = make_state(seed=4)
    for where, wanted in ((first.where, before), (second.where, values(state))):
        saving.load_checkpoint(where, again)
        assert same(values(again), wanted)
    place, damaged = writer.newest()
    assert (str(place), damaged) == (second.where, [])
    assert str(writer.newest(below=3)[0]) == first.where
    writer.discard(3)
    assert writer.names() == ["step-00000001"]
    writer.close()


def test_a_state_that_does_not_fit_twice_is_written_in_place(tmp_path, trained):
    saving.save_checkpoint(tmp_path / "copied", trained, cursor=1)
    writer = saving.JaxCheckpointer(tmp_path / "in_place", trained, room=0)
    found = writer.save(cursor=1)
    assert found.done()
    assert "training waits while a checkpoint is written" in found.note
    writer.close()
    files = [(tmp_path / d / "step-00000002/shard-00000-of-00001.safetensors").read_bytes() for d in ("copied", "in_place")]
    assert files[0] == files[1]


def test_retention_lease_and_overwriting(tmp_path):
    state = make_state()
    writer = saving.checkpointer(tmp_path, state, keep=Retention(last=2), overlap=False, run="")
    for _ in range(3):
        train(state, BATCHES[:1])
        writer.save().result()
    assert writer.names() == ["step-00000002", "step-00000003"]
    train(state, BATCHES[:1])
    state.step = 3
    assert "holds another state already" in said(lambda: saving.save_checkpoint(tmp_path, state))
    other = replace(writer.lease.holder, id="other", pid=1)
    writer.checkpoint_dir.create(lease.lease_name(writer.lease.number + 1), other.to_bytes())
    state.step = 4
    found = writer.save()
    assert "was taken over" in said(found.result)
    assert found.lease_lost
    assert not found.not_finite
    assert writer.names() == ["step-00000002", "step-00000003"]
    writer.close()


def test_what_cannot_be_saved(tmp_path, monkeypatch):
    state = make_state()
    writer = saving.checkpointer(tmp_path, state, keep=None, overlap=True, run="")
    with monkeypatch.context() as patch:
        patch.setattr(Local, "free", lambda self: 5 << 20)
        writer.refuse_no_space(1)
        assert "6 checkpoints" in said(lambda: writer.refuse_no_space(6))
        patch.setattr(Local, "free", lambda self: 1000)
        found = writer.save()
        assert "1000 B free" in said(found.result)
        assert not found.not_finite
    name = "model.norm.weight"
    state.params[name] = state.params[name].at[3].set(np.nan)
    found = writer.save()
    assert f"the weights in {name} are not finite" in said(found.result)
    assert found.not_finite
    assert writer.names() == []
    in_place = saving.JaxCheckpointer(tmp_path, state, room=0)
    found = in_place.save()
    assert f"the weights in {name} are not finite" in said(found.result)
    assert found.not_finite
    in_place.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [writer.lease.name]
    writer.close()
    assert list(tmp_path.iterdir()) == []


# -- what is refused -----------------------------------------------------------------------------------------------


def test_damage_and_other_models_are_refused(tmp_path, trained):
    place = Path(saving.save_checkpoint(tmp_path / "a", trained))
    other = make_state(seed=4)
    before = values(other)
    file = place / "shard-00000-of-00001.safetensors"
    whole = file.read_bytes()
    for at in (9, 4097, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        assert "is damaged" in said(lambda: saving.load_checkpoint(place, other))
    file.write_bytes(whole)
    deeper = lambda rngs: NnxLlama(replace(LLAMA, layers=3), rngs=rngs)
    wider = lambda rngs: NnxLlama(replace(LLAMA, vocab=72), rngs=rngs)
    cases = {
        "it lacks model.model.layers.2": (deeper, ADAMW),
        "(F32 [64, 32] instead of F32 [72, 32])": (wider, ADAMW),
        "momentum_buffer": (llama, fs.SGD(lr=0.1, momentum=0.9)),
    }
    for sentence, (make, optimizer) in cases.items():
        found = make_state(make, optimizer, seed=4)
        held = values(found)
        refused = said(lambda found=found: saving.load_checkpoint(place, found))
        assert "is of another model or optimizer" in refused
        assert sentence in refused
        assert same(values(found), held)
    assert same(values(other), before)
    assert other.step == 0
    assert "neither a checkpoint nor" in said(lambda: saving.load_checkpoint(tmp_path / "none", other))
    saving.load_checkpoint(tmp_path / "a", other)
    assert same(values(other), values(trained))


KILLED = """
import sys, threading
from fullshard.checkpoint.directories import Local
from fullshard.on_jax import saving
from tests.jax.test_jax_saving import make_state

def half(self, name, data, length=None):
    (self.path / name).write_bytes(bytes(data[:5000]))
    print("writing", flush=True)
    threading.Event().wait()

state = make_state(optimizer=None)
writer = saving.checkpointer(sys.argv[1], state, keep=None, overlap=True, run="")
writer.save().result()
state.step = 1
Local.write = half
writer.save().result()
"""


def test_a_killed_save_is_invisible(tmp_path):
    there = tmp_path / "checkpoints"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(there)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "writing\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert commit.committed(Local(there)) == ["step-00000000"]
    assert any(name.endswith(".partial") for name in os.listdir(there))
    state = make_state(optimizer=None)
    writer = saving.checkpointer(there, state, keep=None, overlap=True, run="")
    writer.sweep()
    assert sorted(os.listdir(there)) == sorted([writer.lease.name, "step-00000000"])
    assert str(writer.newest()[0]) == str(there / "step-00000000")
    writer.close()


# -- commands and other programs -----------------------------------------------------------------------------------


def command(*args: str) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_commands_read_it(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    size = PRESETS["llama-nano"]
    make = lambda rngs: NnxLlama(size, rngs=rngs)
    state = make_state(make, optimizer=None)
    saving.JaxCheckpointer(tmp_path / "run", state).save(recipe={"model": {"name": "llama-nano"}}, cursor=5).result()
    place = str(tmp_path / "run")
    assert "whole" in command("verify", place)
    assert "step-00000000" in command("ls", place)
    assert "model.model.embed_tokens.weight" in command("show", place)
    assert "the same, bit for bit" in command("diff", place, place)
    command("export", place, "-o", str(tmp_path / "hf"))
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, size.vocab, (2, 12))
    with torch.no_grad():
        wanted = hf(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(np.asarray(state.model(ids)), wanted, atol=1e-5)
    again = on_jax.shard(make, state.plan, weights=tmp_path / "hf", seed=1)
    assert same(again.params, state.params)


@pytest.mark.parametrize("ocdbt", [True, False])
def test_orbax_directories_are_imported(tmp_path, ocdbt):
    """A tree of NNX, and one of plain tables with the optimizer beside it."""
    state = make_state(optimizer=None)
    trees = {"nnx": nnx.state(state.model, nnx.Param), "plain": {"params": nested(state.params), "opt": {"count": jnp.int32(4)}}}
    for name, tree in trees.items():
        ocp.PyTreeCheckpointer(use_ocdbt=ocdbt).save(tmp_path / name, tree)
        command("import", str(tmp_path / name), "-o", str(tmp_path / f"{name}-imported"), "--step", "3")
        again = make_state(seed=4)
        saving.load_checkpoint(tmp_path / f"{name}-imported", again)
        assert again.step == 3
        assert same(again.params, state.params)


def test_the_newest_step_of_an_orbax_manager(tmp_path):
    manager = ocp.CheckpointManager(tmp_path / "manager")
    for step in (9, 10):
        manager.save(step, args=ocp.args.StandardSave({"w": np.full(3, step, np.float32)}))
    manager.wait_until_finished()
    manager.close()
    command("import", str(tmp_path / "manager"), "-o", str(tmp_path / "imported"))
    assert open_checkpoint(tmp_path / "imported").tensor("model.w").tolist() == [10, 10, 10]


def nested(params) -> dict:
    tree: dict = {}
    for name, value in params.items():
        *path, last = name.split(".")
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[last] = value
    return tree


def test_orbax_restores_an_export(tmp_path, monkeypatch):
    monkeypatch.setattr("fullshard.checkpoint.other_formats.export_orbax.CHUNK", 900)  # several chunks, the last one padded
    state = make_state(optimizer=None)
    saving.JaxCheckpointer(tmp_path / "run", state).save().result()
    command("export", str(tmp_path / "run"), "-o", str(tmp_path / "orbax"), "--format", "orbax")
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), nested(state.params))
    for found in (
        ocp.StandardCheckpointer().restore(tmp_path / "orbax", shapes),
        ocp.PyTreeCheckpointer().restore(tmp_path / "orbax"),
    ):
        jax.tree.map(np.testing.assert_array_equal, found, nested(state.params))
    command("import", str(tmp_path / "orbax"), "-o", str(tmp_path / "imported"))
    again = make_state(optimizer=None, seed=3)
    saving.load_checkpoint(tmp_path / "imported", again)
    assert same(again.params, state.params)


def test_bad_orbax_directories(tmp_path):
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(tmp_path / "a", {"w": np.ones((4, 4), np.float32)})
    metadata, zarray = (tmp_path / "a" / name for name in ("_METADATA", "w/.zarray"))
    whole = metadata.read_text(), zarray.read_text()
    cases = {
        "is not metadata of Orbax": (whole[0].replace("key_metadata", "keys"), whole[1]),
        "is not a file in it": (whole[0].replace('"key": "w"', '"key": "../w"'), whole[1]),
        "w cannot be read": (whole[0], whole[1].replace('"<f4"', '"<f9"')),
        "and claims tensors of": (whole[0], whole[1].replace('"shape":[4,4]', '"shape":[400000,400000]')),
    }
    for sentence, (first, second) in cases.items():
        metadata.write_text(first)
        zarray.write_text(second)
        assert sentence in said(lambda: import_weights(str(tmp_path / "a"), Local(tmp_path / "out")))
        assert not (tmp_path / "out").exists()
    for name in ("one", "two"):
        (tmp_path / "items" / name).mkdir(parents=True)
        (tmp_path / "items" / name / "_METADATA").write_text(whole[0])
    assert "several trees of Orbax (one, two)" in said(lambda: import_weights(str(tmp_path / "items"), Local(tmp_path / "out")))


# -- several processes ---------------------------------------------------------------------------------------------

PROCESS = """
import json, os, sys
from fullshard.on_jax.ranks import processes
processes.start()
import jax, numpy as np
import fullshard as fs
from fullshard import on_jax
from fullshard.on_jax import saving
from fullshard.on_jax.saving.array_staging import parts
from tests.jax.test_jax_saving import ADAMW, BATCHES, CLIP, FP32, ROWS, llama

def make(seed):
    plan = fs.hybrid(on_jax.describe(llama), replicate=2, shard=2, batch=fs.Batch(ROWS // 4, 12), precision=FP32)
    return on_jax.shard(llama, plan, ADAMW, seed=seed)

def train(state, batches):
    own = slice(ROWS // 2 * jax.process_index(), ROWS // 2 * (jax.process_index() + 1))
    return [float(on_jax.train_step(state, [{k: v[own] for k, v in b.items()}], clip=CLIP).loss) for b in batches]

def held(state):
    return {(n, at): np.asarray(p) for n, a in state.params.items() for at, p in parts(a).items()}

state, where = make(0), sys.argv[1]
losses = train(state, BATCHES[:2])
writer = saving.checkpointer(where, state, keep=None, overlap=True, run="")
writer.save(cursor=2 * ROWS).result()
size = writer.staging.shards.layout.nbytes
writer.close()
before, losses = held(state), losses + train(state, BATCHES[2:4])
again = make(1)
manifest = saving.load_checkpoint(where, again)
after = held(again)
equal = before.keys() == after.keys() and all(np.array_equal(before[k], after[k]) for k in before)
print(json.dumps([losses, train(again, BATCHES[2:4]), equal, size, manifest.cursor]), flush=True)
processes.finish()
"""


@pytest.mark.full
def test_two_processes_save_and_load_as_one(tmp_path):
    port = free_port()
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env["XLA_FLAGS"] = env["XLA_FLAGS"].replace("device_count=8", "device_count=2")
    start = lambda rank: subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(tmp_path)], env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
    )
    running = [start(rank) for rank in range(2)]
    found = [json.loads(process.communicate(timeout=500)[0].splitlines()[-1]) for process in running]
    one = make_state(devices=4)
    wanted = train(one, BATCHES[:4])
    for losses, resumed, equal, _, cursor in found:
        assert losses == pytest.approx(wanted, abs=2e-6)
        assert resumed == losses[2:]
        assert equal
        assert cursor == 2 * ROWS
    sizes = [size for *_, size, _ in found]
    assert abs(sizes[0] - sizes[1]) < sum(sizes) // 10  # what both hold is written once, by either
    assert problems(Local(tmp_path / "step-00000002")) == []
    again = make_state(seed=3)
    saving.load_checkpoint(tmp_path, again)
    assert again.step == 2
    assert train(again, BATCHES[2:4]) == pytest.approx(wanted[2:], abs=2e-6)


def free_port() -> int:
    """One of which the next is free as well: the coordinator listens there."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1] - 1
