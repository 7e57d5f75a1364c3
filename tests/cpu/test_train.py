"""`fullshard train` for real: ranks through torchrun, a directory of results, the same losses at every world size."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fullshard import FullshardError, Plan
from fullshard.data import Batches, TokenFile
from fullshard.data.pack_tokens import pack
from fullshard.on_torch import describe, initialize, load_model
from fullshard.plan import optimizer as optimizers
from fullshard.planner.strategies import zero3
from fullshard.runs.prepare.prepare import prepare
from fullshard.runs.prepare.recipe_plan import make_optimizer
from fullshard.runs.recipe.lr_schedule import factor
from fullshard.runs.recipe.recipe import load_recipe
from tests.command import fullshard_here

MODEL = """
from fullshard.on_torch.model.built_in import Llama
from fullshard.model.presets import LlamaSize

def make():
    return Llama(LlamaSize(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=64))
"""
RECIPE = """
plan = "zero3"
[model]
name = "model.py:make"
[data]
path = "tokens"
sequence = 32
[optim]
lr = 1e-3
clip = 0.5
[schedule]
warmup = 2
[train]
steps = 6
global_batch = 8
micro_batch = 2
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("train")
    (path / "model.py").write_text(MODEL)
    (path / "recipe.toml").write_text(RECIPE)
    texts = sorted(Path(json.__file__).parent.glob("*.py"))
    pack(texts, path / "tokens", workers=1)
    pack(texts[:1], path / "valid", workers=1)
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fullshard", *arguments]


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**clean, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def train(here: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    line = command("train", "recipe.toml", *arguments) if not launcher else [*launcher, "train", "recipe.toml", *arguments]
    return subprocess.run(line, cwd=here, env=environment(), capture_output=True, text=True, timeout=200, check=False)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def by_hand(here: Path) -> list[float]:
    """The same training with plain torch in one process: the oracle."""
    model = load_model(f"{here}/model.py:make")
    initialize(model, torch.device("cpu"), seed=0)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1
    )
    source = iter(Batches(TokenFile(here / "tokens"), 32, 8))
    losses = []
    for step in range(6):
        batch = {k: torch.as_tensor(v) for k, v in next(source)[0].items()}
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * factor(step, 6, "cosine", warmup=2, final=0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


full = pytest.mark.full


# In `make test`, test_resume.py compares the losses of 1, 2 and 4 ranks, without the seconds that launchers take.
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, [], marks=full),
        pytest.param(2, ["plan.strategy=ddp"], marks=full),
        pytest.param(4, ["plan.remat=full"], marks=full),
    ],
)
def test_the_same_losses_at_every_world_size_and_by_hand(here, ranks, options):
    run = here / f"runs/{ranks}"
    done = train(here, *options, "--ranks", str(ranks), "--run", str(run))
    assert done.returncode == 0, done.stderr
    assert [m["loss"] for m in metrics(run)] == pytest.approx(by_hand(here), rel=2e-6)
    assert [m["step"] for m in metrics(run)] == [1, 2, 3, 4, 5, 6]
    plan = Plan.load(run / "plan.json")
    assert plan.mesh.devices == ranks
    assert plan.mesh.data * plan.batch.accumulate * plan.batch.micro_batch == 8
    assert json.loads((run / "recipe.json").read_text())["optim"]["clip"] == 0.5


@pytest.mark.full
def test_evaluation_and_an_outer_torchrun(here):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fullshard")
    # torchrun would take --run for an option of its own: the directory is the default
    done = train(here, "data.valid=valid", "eval.every=3", "eval.batches=2", launcher=torchrun)
    assert done.returncode == 0, done.stderr
    found = [m for m in metrics(here / "runs/latest") if "eval_loss" in m]
    assert [m["step"] for m in found] == [3, 6]
    assert found[1]["eval_loss"] < found[0]["eval_loss"] < 6


def alone(process: subprocess.Popen, number: int) -> None:
    process.send_signal(number)


def as_a_terminal_does(process: subprocess.Popen, number: int) -> None:
    os.killpg(process.pid, number)


def to_the_ranks(process: subprocess.Popen, number: int) -> None:
    for rank in children(process.pid):
        os.kill(int(rank), number)


def to_all(process: subprocess.Popen, number: int) -> None:
    to_the_ranks(process, number)
    process.send_signal(number)


@pytest.mark.parametrize(
    ("send", "number", "code"),
    [
        (alone, signal.SIGTERM, 143),
        pytest.param(alone, signal.SIGINT, 130, marks=full),
        pytest.param(as_a_terminal_does, signal.SIGINT, 130, marks=full),
        pytest.param(alone, signal.SIGUSR1, 85, marks=full),
        pytest.param(to_the_ranks, signal.SIGTERM, 143, marks=full),
        pytest.param(to_all, signal.SIGUSR1, 85, marks=full),
    ],
    ids=["SIGTERM", "SIGINT", "Ctrl-C", "SIGUSR1", "SIGTERM to ranks", "SIGUSR1 to all"],
)
def test_a_signal_ends_all_ranks_at_a_step(here, send, number, code):
    run = here / f"runs/{send.__name__}-{number}"
    process = start(here, "train.steps=100000", "--run", str(run), "--max-restarts", "1")
    try:
        wait_until(process, lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) >= 3)
        send(process, number)
        _, said = process.communicate(timeout=200)
    finally:
        process.kill()
    *_, last_step, last = metrics(run)
    assert last == {"event": "stopped", "step": last_step["step"]}
    assert process.returncode == code
    assert "Traceback" not in said
    told = [json.loads(path.read_text()) for path in sorted((run / "ranks").iterdir())]
    assert [(t["rank"], t["step"], t["ended"]) for t in told] == [(rank, last["step"], True) for rank in range(2)]
    ended = said.splitlines()[-6:]
    assert ended[0] == f"ended after step {last['step']}: stopped"
    assert ended[1].startswith(f"step {last['step']}: saved {run}/checkpoints/step-{last['step']:08d}, ")
    assert ended[2].startswith(f"trained     {last['step']} steps in ")
    assert ended[4] == f"checkpoint  {run}/checkpoints/step-{last['step']:08d}"
    assert ended[5] == f"resume      fullshard train recipe.toml train.steps=100000 --run {run} --max-restarts 1 --resume auto"


@full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 85)])
def test_a_signal_before_the_first_step_is_no_traceback_either(here, number, code):
    """Ranks that are still importing torch have no step to end at."""
    process = start(here, "train.steps=100000", "--run", "runs/early")
    try:
        wait_until(process, lambda: len(children(process.pid)) == 2)
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in said


def start(here: Path, *arguments: str) -> subprocess.Popen:
    """In a process group of its own, as a shell starts a command."""
    line = command("train", "recipe.toml", *arguments)
    return subprocess.Popen(line, cwd=here, env=environment(), stderr=subprocess.PIPE, text=True, process_group=0)


def wait_until(process: subprocess.Popen, ready) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)


def children(pid: int) -> list[str]:
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [child for found in lists for child in found]


def test_dry_run_shows_the_plan_and_writes_nothing(here):
    done = fullshard_here("train", "recipe.toml", "--dry-run", "--run", "runs/dry", cwd=here)
    assert done.returncode == 0, done.stderr
    assert '"decay_all": false' in done.stderr  # all keys, and the table of units
    assert "model.layers.0 … model.layers.1 (2)  sharded" in done.stderr
    said = "dry run, nothing is started or written; it would be: 6 steps into runs/dry, weights drawn"
    assert done.stderr.splitlines()[-1] == said
    assert not (here / "runs/dry").exists()


def test_bad_input_exits_2_with_one_line(here):
    done = fullshard_here("train", "recipe.toml", "optim.lrr=1", "--run", "runs/bad", cwd=here)
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if not line.endswith(" …")]  # without what it was doing
    assert len(said) == 1
    assert said[0].startswith("error: recipe.toml: unknown key optim.lrr")
    assert not (here / "runs/bad").exists()


BAD = {
    "data.path=nowhere": "nowhere is not a directory of token files",
    "data.sequence=65": "data.sequence = 65 is longer than the model's 64",
    "train.global_batch=6": "train.global_batch = 6 is not a multiple of 4: 2 data ranks × train.micro_batch = 2",
    "model.name=llama-nano": "has a vocabulary of 256, the model one of 64; use the model's own tokenizer",
    "model.name=lama": "unknown model 'lama'",
    "plan.tensor=3": "plan.tensor = 3 × plan.replicate = 1 must divide the 2 ranks",
    "plan=other.json": "unit embed: this model has no module 'tok_embeddings'",
    "plan=eight.json": "eight.json is for 8 devices, but 2 ranks will run",
    "plan=long.json": "long.json is for steps of 8 × 64 tokens, the recipe for 8 × 32",
    "plan=none.json": "cannot read plan none.json",
    "plan.loss_kernel=fused": "kernels.loss = 'fused' is a kernel for GPUs, and this device is a CPU; leave it out",
    "plan.attention_kernel=cudnn": "kernels.attention = 'cudnn' is a backend for GPUs, and this device is a CPU; write 'flash'",
    "plan.wire_memory=nccl": "wire.memory = 'nccl' is for NCCL, and these devices are CPUs; leave it out",
    "plan.cluster=2xh10": "unknown device 'h10'; did you mean 'h100'?",
    "plan.cluster=2xh100 plan.tensor=2": "plan.cluster has no effect: what a step of model.py:make costs with this plan is not",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_found_before_any_rank_starts(here, monkeypatch, override):
    monkeypatch.chdir(here)
    from fullshard import Batch

    other, own = load_model("gpt-nano"), load_model("model.py:make")
    zero3(describe(other), devices=2, batch=Batch(2, 32, 2)).save("other.json")
    zero3(describe(own), devices=8, batch=Batch(1, 32)).save("eight.json")
    zero3(describe(own), devices=2, batch=Batch(2, 64, 2)).save("long.json")
    with pytest.raises(FullshardError) as caught:
        prepare(load_recipe("recipe.toml", override.split()), 2)
    assert BAD[override] in str(caught.value)


def test_too_little_data(here, tmp_path, monkeypatch):
    monkeypatch.chdir(here)
    (tmp_path / "a.txt").write_text("short")
    pack([tmp_path / "a.txt"], tmp_path / "few", workers=1)
    with pytest.raises(FullshardError, match="has 6 tokens, too few for one sample of 32"):
        prepare(load_recipe("recipe.toml", [f"data.path={tmp_path / 'few'}"]), 2)


@pytest.mark.parametrize(("name", "kind"), [("adamw", optimizers.AdamW), ("adam", optimizers.Adam), ("sgd", optimizers.SGD)])
def test_optimizers_by_name(here, name, kind):
    made = make_optimizer(load_recipe(here / "recipe.toml", [f"optim.name={name}", "optim.decay_all=true"]))
    assert type(made) is kind
    assert made.decay_all is True


@full
def test_what_rests_on_disk_is_judged_before_the_run_and_changes_no_loss(here):
    resident = train(here, "train.steps=3", "--run", "resident")
    assert resident.returncode == 0, resident.stderr
    homes = ("home.params=disk", "home.optimizer=disk", "home.activations=disk", "disk.path=.")
    found = train(here, "train.steps=3", *homes, "--run", "on-disk")
    assert found.returncode == 0, found.stderr
    said = [line for line in found.stderr.splitlines() if "the disk needs" in line]
    assert len(said) == 1
    assert "of each step (" in said[0]
    assert "read at" in said[0]
    losses = [[m["loss"] for m in metrics(here / run) if "loss" in m] for run in ("resident", "on-disk")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
