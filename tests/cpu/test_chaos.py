"""Training that is killed, again and again, at any moment: what goes on is what would have been."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.verify import problems
from fullshard.data.pack_tokens import pack
from tests.cpu.chaos import LEASE_PHASES, PHASES, RETENTION_PHASES, ROLLBACK_PHASES, in_process
from tests.cpu.test_divergence import MODEL as FRAGILE
from tests.cpu.test_divergence import plant
from tests.cpu.test_train import MODEL, RECIPE, command, environment, metrics


@pytest.fixture
def here(tmp_path) -> Path:
    (tmp_path / "model.py").write_text(MODEL.replace("layers=2", "layers=1").replace("dim=32", "dim=16"))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    pack([Path(json.__file__).with_name("scanner.py")], tmp_path / "tokens", workers=1)  # 75 samples: many epochs
    return tmp_path


AWAY = ["home.optimizer=disk", "home.params=disk", "disk.path=."]
WHOLE = [
    (6, 2, AWAY),
    (1, 2, []),
    (2, 4, ["plan.strategy=hybrid", "plan.replicate=2"]),
    (3, 2, ["plan.strategy=ddp", "checkpoint.background=false"]),
    (4, 1, ["optim.name=sgd", "optim.momentum=0.9"]),
]


@pytest.mark.parametrize(
    ("kills", "seed", "world", "options"),
    [(2, 0, 2, []), *(pytest.param(50, *case, marks=pytest.mark.full) for case in WHOLE)],
    ids=str,
)
def test_after_each_kill_the_run_goes_on_to_the_bit(here, kills, seed, world, options):
    """What holds after each kill is in `tests/cpu/judge.py`: whole checkpoints, the losses and the rows of the
    uninterrupted run, every sample of the token file once an epoch, no garbage."""
    found = carry_out(here, kills, seed, world, options)
    assert found["kills"] == kills
    assert found["rows"] > found["epoch"]  # so that every sample had its turn
    if kills >= 50:  # somebody died in every phase of a save
        assert {m.split(" ", 2)[2] for m in found["met"]} >= {*PHASES}


@pytest.mark.full  # test_lease.py and test_resume.py have each of it alone
@pytest.mark.parametrize("kills", [50])
def test_kills_with_a_damaged_checkpoint_and_in_leases(here, kills):
    """A damaged checkpoint, newer than all others, lies there each time. Ranks die while they take the lease, break the
    dead one's, renew it, and in retention: the whole checkpoints stay, and the next start waits for nobody."""
    found = carry_out(here, kills, 7, 2, ["with:damage"])
    assert found["kills"] == kills
    assert {m.split(" ", 2)[2] for m in found["met"]} >= {*LEASE_PHASES, *RETENTION_PHASES}


@pytest.mark.full
@pytest.mark.parametrize("kills", [50])
def test_kills_of_a_run_that_rolls_back(here, kills):
    """One row of each epoch is bad: the run goes back to its last checkpoint and on behind that batch. Killed before and
    after it has gone back, it ends with the bytes of a run that was not."""
    (here / "model.py").write_text(FRAGILE)
    plant(here, 3, rows=4)
    found = carry_out(here, kills, 8, 2, ["with:divergence"])
    assert found["kills"] == kills
    assert {m.split(" ", 2)[2] for m in found["met"]} >= {*ROLLBACK_PHASES}


@pytest.mark.full
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.full)])
def test_kills_while_the_disk_is_full(here, kills):
    """The run's directory is on a disk of a few MiB, which is filled to the last byte before the kill and freed after it."""
    (here / "runs").mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(here / "runs")]
    if subprocess.run(small, check=False, capture_output=True).returncode:
        pytest.skip("only root may make a small disk")
    try:
        found = carry_out(here, kills, 9, 2, ["with:full"])
    finally:
        subprocess.run(["umount", "-l", str(here / "runs")], check=True)
    assert found["kills"] == kills
    assert all(m.endswith("the disk full") for m in found["met"])


def carry_out(here: Path, kills: int, seed: int, world: int, options: list[str], **variables: str) -> dict:
    found = in_process(environment() | variables, str(here), kills, seed, world, options)
    print(found)
    return found


@pytest.mark.full
def test_the_launcher_is_killed_and_takes_its_ranks_along(here):
    """Real torchrun: orphans that trained on would write into the run of whoever resumes it."""
    draw, options = random.Random(7), ["checkpoint.every=2", "checkpoint.keep=0", "schedule.kind=constant"]
    run, steps = here / "runs/launched", ["train.steps=100000"]
    for _ in range(4):
        line = command("train", "recipe.toml", *options, *steps, "--run", str(run), "--resume", "auto")
        process = subprocess.Popen(line, cwd=here, env=environment(), stderr=subprocess.PIPE, text=True)
        wait_for_steps(run, 5, process)
        time.sleep(draw.random())
        ranks = [int(c) for p in Path(f"/proc/{process.pid}/task").glob("*/children") for c in p.read_text().split()]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert ranks
        wait_for_end(ranks)
        checkpoint_dir = Local(run / "checkpoints")
        assert all(problems(checkpoint_dir.child(n)) == [] for n in commit.committed(checkpoint_dir))
    end = f"train.steps={commit.step_of(commit.committed(checkpoint_dir)[-1]) + 5}"
    launch(here, *options, end, "--run", str(run), "--resume", "auto")
    launch(here, *options, end, "--run", "runs/fresh")
    assert [m["loss"] for m in metrics(run)] == [m["loss"] for m in metrics(here / "runs/fresh")]
    assert not [n for n in os.listdir(run / "checkpoints") if n.startswith(".")]


def launch(here: Path, *arguments: str) -> None:
    line = command("train", "recipe.toml", *arguments)
    done = subprocess.run(line, cwd=here, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def wait_for_steps(run: Path, count: int, process: subprocess.Popen) -> None:
    """Until the run has logged `count` steps beyond the checkpoint that it resumed from."""
    names, began = commit.committed(Local(run / "checkpoints")), time.time()
    resumed = commit.step_of(names[-1]) if names else 0
    path, deadline = run / "metrics.jsonl", time.monotonic() + 100
    while not path.exists() or path.stat().st_mtime < began or whole_lines(run) < resumed + count:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)


def whole_lines(run: Path) -> int:
    return (run / "metrics.jsonl").read_text().count("\n")


def wait_for_end(processes: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{p}").exists() and "State:\tZ" not in Path(f"/proc/{p}/status").read_text() for p in processes):
        assert time.monotonic() < deadline, "ranks outlived their launcher"
        time.sleep(0.05)
