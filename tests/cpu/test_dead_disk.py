"""A run whose directory stops to answer ends with a sentence and its code, and hears SIGTERM, wherever it stands."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.commands.cli import app
from fullshard.data.pack_tokens import pack
from tests.cpu.dead_disk import library, surroundings
from tests.cpu.test_train import MODEL, RECIPE, command, environment, metrics

SILENT = "has not answered for"


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("dead")
    (path / "model.py").write_text(MODEL)
    (path / "recipe.toml").write_text(RECIPE)
    pack(sorted(Path(json.__file__).parent.glob("*.py")), path / "tokens", workers=1)
    library(path)
    return path


def start(here: Path, name: str, first: str = "", ranks: int = 2) -> subprocess.Popen:
    run = here / name
    line = command("train", "recipe.toml", "train.steps=100000", "train.hang_seconds=4", "--run", str(run), "--ranks", str(ranks))
    planted = environment() | surroundings(here / "dead_disk.so", run, here / f"{name}-is-dead", first)
    return subprocess.Popen(line, cwd=here, env=planted, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen, what) -> None:
    deadline = time.monotonic() + 200  # on a loaded machine
    while not what():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)


def last_line(process: subprocess.Popen) -> str:
    return process.communicate(timeout=150)[1].strip().splitlines()[-1]


def test_options_are_read_without_a_look_at_the_directory(monkeypatch):
    looked, plain = [], os.stat
    monkeypatch.setattr(os, "stat", lambda path, **more: (looked.append(str(path)), plain(path, **more))[1])
    monkeypatch.setattr("fullshard.commands.train.launch_ranks", lambda given: looked.append(given))
    CliRunner().invoke(app, ["train", "recipe.toml", "--run", "dead/run"])
    assert looked[-1].run == Path("dead/run")
    assert "dead/run" not in looked


@pytest.mark.full
def test_a_directory_that_dies_during_steps_ends_the_run_as_hung(here):
    process = start(here, "steps")
    wait_for(process, lambda: (here / "steps/metrics.jsonl").exists() and len(metrics(here / "steps")) >= 3)
    (here / "steps-is-dead").touch()
    said = last_line(process)
    assert "rank 0 did not come: it is in _write (json_lines.py:" in said
    assert "rank 1 waits in the " in said
    assert f"{here / 'steps'} {SILENT}" in said
    assert process.returncode == 4


@pytest.mark.full
@pytest.mark.parametrize("first", ["/checkpoints", "/.recipe.json", "/metrics.jsonl"])
def test_sigterm_ends_a_start_that_blocks_within_seconds(here, first):
    name = "start" + first.strip("/.").replace(".", "")
    process = start(here, name, first)
    wait_for(process, lambda: (here / f"{name}-is-dead").exists())
    time.sleep(1)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    last_line(process)
    assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)  # before ranks start: a shell calls both 143
    assert time.monotonic() - began < 60  # a loaded machine; half of it on another


@pytest.mark.full
@pytest.mark.parametrize(("first", "ranks"), [("", 1), ("/.recipe.json", 1), ("/checkpoints", 2)])
def test_a_start_that_blocks_ends_by_itself(here, first, ranks):
    name = f"alone{first.strip('/.').replace('.', '')}"
    if not first:
        (here / f"{name}-is-dead").touch()
    process = start(here, name, first, ranks)
    said = last_line(process)
    assert SILENT in said
    assert "in the start" in said
    assert process.returncode == 4
