"""`fullshard train --engine jax` for real: a directory of results, the losses of torch, runs that go on on the other engine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import fullshard as fs
from fullshard import FullshardError, on_jax
from fullshard.data.pack_tokens import pack
from fullshard.engine.engine import load_engine
from fullshard.runs.prepare.prepare import prepare
from fullshard.runs.recipe.recipe import load_recipe
from tests.cpu.slurm import slurm  # noqa: F401 - a fixture
from tests.jax.conftest import QUICK

ROOT = Path(__file__).parents[2]

RECIPE = """
[model]
name = "llama-bytes"
weights = "weights"
[data]
path = "tokens"
valid = "valid"
sequence = 16
[plan]
strategy = "zero3"
[optim]
lr = 1e-3
clip = 0.5
[schedule]
warmup = 2
[train]
steps = 6
global_batch = 8
micro_batch = 2
[eval]
every = 3
batches = 2
[checkpoint]
every = 3
"""
MODEL = """
from flax import nnx

class Bigrams(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(256, 256, rngs=rngs)

    def __call__(self, ids):
        return self.table(ids)

class Two(Bigrams):
    def __call__(self, ids, mask):
        return self.table(ids)

def make(rngs):
    return Bigrams(rngs)

def two(rngs):
    return Two(rngs)

def no_rngs():
    return Bigrams(nnx.Rngs(0))

class Narrow(Bigrams):
    def __init__(self, rngs):
        self.table = nnx.Embed(256, 256, dtype="bfloat16", rngs=rngs)

def narrow(rngs):
    return Narrow(rngs)
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("jax-runs")
    (path / "recipe.toml").write_text(RECIPE)
    (path / "model.py").write_text(MODEL)
    texts = sorted(Path(json.__file__).parent.glob("*.py"))
    pack(texts, path / "tokens", workers=1)
    pack(texts[:1], path / "valid", workers=1)
    (path / "weights").mkdir()
    make = on_jax.load_model("llama-bytes")
    drawn = on_jax.shard(make, fs.ddp(on_jax.describe(make), devices=1), seed=5)
    save_file({name: np.asarray(value) for name, value in drawn.params.items()}, path / "weights/model.safetensors")
    return path


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "XLA_FLAGS")}
    ours = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(QUICK)}
    return {**kept, **ours, **more}


def train(here: Path, run: str, *arguments: str, on: str = "jax", **more: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "fullshard", "train", "recipe.toml", "--run", run, "--engine", on, *arguments]
    return subprocess.run(line, cwd=here, env=environment(**more), capture_output=True, text=True, timeout=400, check=False)


def lines(here: Path, run: str) -> list[dict]:
    return [json.loads(line) for line in (here / run / "metrics.jsonl").read_text().splitlines()]


def losses(here: Path, run: str) -> list[float]:
    return [line["loss"] for line in lines(here, run) if "loss" in line]


@pytest.fixture(scope="module")
def whole(here) -> list[float]:
    """The losses of an uninterrupted run on two simulated devices, where neither torch nor transformers can be imported."""
    (here / "absent").mkdir()
    for name in ("torch", "transformers"):
        (here / "absent" / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    done = train(here, "whole", "--ranks", "2", PYTHONPATH=f"{here / 'absent'}:{ROOT}")
    assert done.returncode == 0, done.stderr
    return losses(here, "whole")


@pytest.fixture(scope="module")
def on_torch(here) -> list[float]:
    """The losses of the same recipe on torch, on two ranks."""
    done = train(here, "torch", "--ranks", "2", on="torch")
    assert done.returncode == 0, done.stderr
    return losses(here, "torch")


def test_a_run_on_jax_has_the_losses_of_torch(here, whole, on_torch):
    assert len(whole) == 6
    assert whole == pytest.approx(on_torch, abs=1e-5)
    evaluated = [[line["eval_loss"] for line in lines(here, run) if "eval_loss" in line] for run in ("whole", "torch")]
    assert len(evaluated[0]) == 2
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-5)
    assert sorted(p.name for p in (here / "whole" / "checkpoints").iterdir() if p.is_dir()) == sorted(
        p.name for p in (here / "torch" / "checkpoints").iterdir() if p.is_dir()
    )


@pytest.mark.full
def test_a_run_goes_on_on_the_other_engine(here, whole, on_torch):
    """Each engine's run of three steps, taken to the end by the other. JAX scans its layers."""
    scan = {"jax": ["model.scan=true"], "torch": []}
    for first, then, ranks in (("torch", "jax", "4"), ("jax", "torch", "2")):
        begun = train(here, f"from-{first}", "train.steps=3", "schedule.kind=constant", *scan[first], "--ranks", "2", on=first)
        assert begun.returncode == 0, begun.stderr
        again = ["schedule.kind=constant", *scan[then], "--ranks", ranks, "--resume", "auto"]
        done = train(here, f"from-{first}", *again, on=then)
        assert done.returncode == 0, done.stderr
        assert losses(here, f"from-{first}")[:3] == pytest.approx(whole[:3], abs=1e-5)
    alone = train(here, "constant", "schedule.kind=constant", "--ranks", "2")
    assert alone.returncode == 0, alone.stderr
    wanted = losses(here, "constant")
    assert losses(here, "from-torch") == pytest.approx(wanted, abs=1e-5)
    assert losses(here, "from-jax") == pytest.approx(wanted, abs=1e-5)


@pytest.mark.full
def test_a_signal_ends_a_run_at_a_step_and_it_goes_on(here):
    line = [sys.executable, "-m", "fullshard", "train", "recipe.toml", "--run", "ended", "--engine", "jax", "--ranks", "2"]
    running = subprocess.Popen([*line, "train.steps=5000"], cwd=here, env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not ((here / "ended" / "metrics.jsonl").exists() and len(lines(here, "ended")) > 3):
        time.sleep(0.2)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 128 + signal.SIGTERM
    done = len(losses(here, "ended"))
    assert f"ended after step {done}: stopped" in running.stderr.read()
    again = train(here, "ended", f"train.steps={done + 2}", "--ranks", "2", "--resume", "auto", "--accept-changes")
    assert again.returncode == 0, again.stderr
    assert len(losses(here, "ended")) == done + 2


@pytest.mark.full
def test_two_processes_train_save_and_resume_as_one(here, whole):
    begun = together(here, "processes", "train.steps=3", "schedule.kind=constant")
    assert [p.returncode for p in begun] == [0, 0], begun[0].stderr
    done = together(here, "processes", "schedule.kind=constant", "--resume", "auto")
    assert [p.returncode for p in done] == [0, 0], done[0].stderr
    alone = train(here, "alone", "schedule.kind=constant", "--ranks", "4")
    assert alone.returncode == 0, alone.stderr
    assert losses(here, "processes") == pytest.approx(losses(here, "alone"), abs=1e-6)


@pytest.mark.full
def test_what_all_processes_find_one_of_them_says(here):
    done = together(here, "refused", "data.path=missing")
    said = [line for p in done for line in p.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, said
    assert said[0].startswith("error: missing")
    assert [p.returncode for p in done] == [2, 2]


def together(here: Path, run: str, *arguments: str) -> list[subprocess.CompletedProcess]:
    """Two processes of two devices each, started as srun and torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "fullshard", "train", "recipe.toml", "--run", run, "--engine", "jax", *arguments]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1), "JAX_NUM_CPU_DEVICES": "2"}
    started = [
        subprocess.Popen(
            line, cwd=here, env=environment(RANK=str(r), **shared), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]
    said = [p.communicate(timeout=200) for p in started]
    return [subprocess.CompletedProcess(line, p.returncode, *text) for p, text in zip(started, said, strict=True)]


@pytest.mark.full
def test_tasks_of_srun_are_processes(slurm, here, whole):  # noqa: F811
    launcher = ["srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1", sys.executable]
    assert launched(here, "srun", launcher, **slurm) == pytest.approx(whole, abs=1e-6)


@pytest.mark.full
def test_ranks_of_torchrun_are_processes(here, whole):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
        "--",
        sys.executable,
    ]
    assert launched(here, "torchrun", launcher) == pytest.approx(whole, abs=1e-6)


def launched(here: Path, run: str, launcher: list[str], **more: str) -> list[float]:
    """The losses of two processes of one device each, started by another launcher."""
    line = [*launcher, "-m", "fullshard", "train", "recipe.toml", "--engine", "jax", "--run", run]
    given = environment(JAX_NUM_CPU_DEVICES="1", PYTHONPATH=str(ROOT), **more)
    given = {k: v for k, v in given.items() if not k.startswith("SLURM") or k in more}
    done = subprocess.run(line, cwd=here, env=given, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads((here / run / "plan.json").read_text())["mesh"]["shard"] == 2
    return losses(here, run)


def test_torch_is_not_needed(here, whole):
    """It could not be imported while `whole` ran."""
    line = [sys.executable, "-c", "import torch"]
    found = subprocess.run(line, env=environment(PYTHONPATH=str(here / "absent")), capture_output=True, text=True, check=False)
    assert "no torch here" in found.stderr
    assert len(whole) == 6


def test_bad_input_is_a_sentence(here, monkeypatch):
    """All of it before ranks start."""
    monkeypatch.chdir(here)
    for changes, sentence in (
        (["lora.rank=4"], "lora: the JAX engine trains whole models; use --engine torch"),
        (["plan.strategy=hpz", "plan.reshard=2"], "on JAX parameters are kept or freed; write True or False"),
        (["optim.name=Adagrad"], "the optimizer Adagrad is of torch; JAX has adamw, adam and sgd"),
        (["plan.compute=fp16"], "the JAX engine has no loss scaling; write 'bf16'"),
        (["home.optimizer=disk", "disk.path=."], "only the torch engine has it; write 'host'"),
        (["plan.prefetch=2"], "XLA schedules gathers itself; leave it out"),
        (["model.init=modules"], "the model's own code sets its initial values"),
        (["model.scan=true", "model.name=model.py:make", "model.weights=draw"], "model.scan: the model has no nnx.List"),
        (["model.scan=true", "home.optimizer=host"], "scanned blocks rest on the device"),
        (["model.name=model.py:make", "model.weights=draw"], "needs a model whose call takes labels"),
        (["model.name=model.py:two", "model.weights=draw", "train.loss=plain"], "missing 1 required positional argument: 'mask'"),
        (["model.name=model.py:no_rngs", "model.weights=draw", "train.loss=plain"], "on JAX the callable takes nnx.Rngs"),
        (["model.name=model.py:make", "model.weights=draw", "train.loss=plain", "plan.strategy=auto"], "name a strategy"),
        (["model.name=model.py:narrow", "model.weights=draw", "train.loss=plain"], "table was made with dtype=bfloat16"),
        (["data.boundaries=attention", "model.name=model.py:make", "model.weights=draw", "train.loss=plain"], "position_ids"),
    ):
        with pytest.raises(FullshardError) as caught:
            prepare(load_recipe("recipe.toml", changes), 4, load_engine("jax"))
        assert sentence in str(caught.value), changes
    own = RECIPE.replace('path = "tokens"\nvalid = "valid"', 'source = "rows.py:Rows"\nworkers = 2')
    (here / "own.toml").write_text(own.replace("[eval]\nevery = 3\nbatches = 2\n", ""))
    with pytest.raises(
        FullshardError, match=r"data.workers = 2 has no effect on rows.py:Rows with --engine jax: its ranks must not"
    ):
        prepare(load_recipe("own.toml", []), 4, load_engine("jax"))
    with pytest.raises(FullshardError, match=r"model\.scan = true: only the JAX engine"):
        prepare(load_recipe("recipe.toml", ["model.scan=true"]), 4, load_engine("torch"))
    refused = train(here, "bad", "plan.compute=fp16", "--ranks", "2")
    assert refused.returncode == 2
    assert refused.stderr.strip().splitlines()[-1].startswith("error: precision.compute = 'fp16'")
    assert not (here / "bad").exists()
