"""A disk that is full, for real: a small tmpfs that holds the run's directory. Training goes on; what is lost is said."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.verify import problems
from fullshard.data.pack_tokens import pack
from fullshard.runs.json_lines import Lines
from fullshard.runs.metrics import Metrics, rewind
from tests.cpu import loop
from tests.cpu.test_train import MODEL, RECIPE, command, environment, metrics


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    found = tmp_path / "disk"
    found.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(found)], check=False, capture_output=True).returncode:
        pytest.skip("only root may make a small disk")
    yield found
    subprocess.run(["umount", "-l", str(found)], check=True)


@pytest.fixture
def here(tmp_path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    pack([Path(json.__file__).with_name("scanner.py")], tmp_path / "tokens", workers=1)
    return tmp_path


def fill(disk: Path) -> None:
    file = os.open(disk / "ballast", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (4096, 1):
        with contextlib.suppress(OSError):
            while os.write(file, b"x" * size):
                pass
    os.close(file)


class Training:
    """`fullshard train` in a process of its own, and what it has said so far."""

    def __init__(self, here: Path, *arguments: str):
        line = command("train", "recipe.toml", *arguments)
        self.process = subprocess.Popen(line, cwd=here, env=environment(), stderr=subprocess.PIPE, text=True)
        self.said = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not happened():
            assert time.monotonic() < deadline, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.05)

    def end(self, number: int | None = None) -> int:
        if number:
            self.process.send_signal(number)
        return self.process.wait(600)


def steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.full
def test_training_goes_on_without_room_and_every_line_is_written_in_the_end(here, disk):
    run = disk / "run"
    training = Training(here, "train.steps=1000000", "schedule.kind=constant", "checkpoint.minutes=0.0", "--run", str(run))
    training.until(lambda: steps(run) > 3)
    fill(disk)
    training.until(lambda: "cannot write to" in training.said)
    last = steps(run)
    assert "metrics.jsonl: No space left on device; the run goes on, and its lines wait for room" in training.said
    assert (run / "metrics.jsonl").read_text().endswith("}\n")  # no line is cut
    time.sleep(1.0)
    (disk / "ballast").unlink()
    training.until(lambda: "is written again, with the lines that waited" in training.said)
    training.until(lambda: steps(run) > last + 5)
    assert training.end(signal.SIGTERM) == 143, training.said
    found = [m["step"] for m in metrics(run) if "loss" in m]
    assert found == list(range(1, len(found) + 1))
    assert "Traceback" not in training.said


@pytest.mark.full
def test_an_end_that_cannot_be_saved_is_a_failure_that_says_what_to_do(here, disk):
    run = disk / "run"
    options = ["train.steps=50", "checkpoint.every=5", "checkpoint.keep=1", "checkpoint.retry_seconds=2.0"]
    training = Training(here, *options, "--run", str(run))
    training.until(lambda: steps(run) > 12)
    fill(disk)
    assert training.end() == 1, training.said
    newest = commit.committed(Local(run / "checkpoints"))[-1]
    last = training.said.strip().splitlines()
    sentence = next(line for line in last if line.startswith("error: "))
    assert sentence.startswith("error: the checkpoint of step 50 was not saved: ")
    assert sentence.endswith(f"go on with --resume auto, or elsewhere with --resume {run}/checkpoints/{newest} --run OTHER")
    assert "the run goes on, and tries again soon" in training.said
    assert "lines of " in training.said
    assert "were not written: No space left on device" in training.said
    assert all(problems(Local(run / "checkpoints" / n)) == [] for n in commit.committed(Local(run / "checkpoints")))
    (disk / "ballast").unlink()
    again = Training(here, *options, "--resume", str(run / "checkpoints" / newest), "--run", str(here / "other"))
    assert again.end() == 0, again.said
    assert problems(Local(here / "other/checkpoints/step-00000050")) == []


def test_the_last_save_waits_for_room(here, disk, ranks):
    """The disk is freed while the run waits; the checkpoint is that of a run that met no full disk."""
    options = ["checkpoint.every=0", "checkpoint.background=false"]
    ranks(2).run(loop.run, str(here), options, "whole")
    freed = threading.Timer(6.0, lambda: (disk / "ballast").unlink())
    freed.start()
    found = ranks(2).run(loop.ended_full, str(here), [*options, f"checkpoint.path={disk}/checkpoints"], "plain", str(disk))
    freed.join()
    assert [code for code, _ in found] == [0, 0], found
    files = [
        commit.read_manifest(Local(p)).files
        for p in (here / "runs/whole/checkpoints/step-00000006", disk / "checkpoints/step-00000006")
    ]
    assert files[0] == files[1]
    events = [m for m in metrics(here / "runs/plain") if m.get("event") == "checkpoint failed"]
    assert events


def test_a_failed_save_is_tried_again_before_the_next_is_due(here, disk, ranks):
    options = ["checkpoint.every=10", "train.steps=19", "checkpoint.final=false", "checkpoint.background=false"]
    freed = [f"checkpoint.path={disk}/checkpoints"]
    found = ranks(2).run(loop.ended_full, str(here), [*options, *freed], "again", str(disk), 13)
    assert [code for code, _ in found] == [0, 0], found
    (name,) = commit.committed(Local(disk / "checkpoints"))
    assert 13 <= commit.step_of(name) < 19


def test_a_start_without_room_is_refused_in_a_sentence(here, disk, ranks):
    fill(disk)
    (here / "runs").mkdir()
    os.symlink(disk, here / "runs/full")
    options = ["checkpoint.final=false", "checkpoint.minutes=0.0"]
    for code, sentence in ranks(2).run(loop.ended, str(here), options, "full"):
        assert code == 2
        assert "No space left on device" in sentence


def test_lines_keep_their_order_and_count_what_they_lose(disk, monkeypatch):
    monkeypatch.setattr(importlib.import_module("fullshard.runs.json_lines"), "HELD", 5)
    lines = Lines(disk / "lines.jsonl")
    lines.append({"n": 0})
    fill(disk)
    block = "x" * 5000  # more than what is left of the file's last page
    for n in range(1, 9):
        lines.append({"n": n, "block": block})
    assert (lines.lost, len(lines.waiting)) == (3, 5)
    assert [json.loads(line)["n"] for line in (disk / "lines.jsonl").read_text().splitlines()] == [0]
    (disk / "ballast").unlink()
    lines.append({"n": 9})
    lines.close()
    assert [json.loads(line)["n"] for line in (disk / "lines.jsonl").read_text().splitlines()] == [0, 5, 6, 7, 8, 9]
    assert lines.unwritten == lines.lost == 4


class Broken:
    def write(self, step, numbers):
        raise OSError("the server is gone")

    def rewind(self, step):
        raise OSError("the server is gone")

    def close(self):
        pass


def test_a_sink_that_raises_costs_its_numbers_alone(tmp_path):
    said: list[str] = []
    found = Metrics(tmp_path, [Broken()])
    found.say = said.append
    for step in range(3):
        found.write(step=step, loss=1.0)
    found.rewind(1)
    found.close()
    assert said == [
        "Broken failed (OSError: the server is gone); the run goes on without it",
        "Broken failed 4 times: it lacks numbers",
    ]
    assert [m["step"] for m in metrics(tmp_path)] == [0, 1]


def test_a_sample_with_a_line_separator_survives_a_resume(tmp_path):
    found = Metrics(tmp_path)
    for step in (1, 2, 3):
        found.write_sample(step=step, prompt="a", text="b\u2028c\x85d")
    found.close()
    rewind(tmp_path, 2)
    lines = (tmp_path / "samples.jsonl").read_bytes().decode().removesuffix("\n").split("\n")
    assert [json.loads(line) for line in lines] == [{"step": s, "prompt": "a", "text": "b\u2028c\x85d"} for s in (1, 2)]


def test_metrics_are_rewound_where_there_is_no_room_for_a_copy(disk):
    found = Metrics(disk)
    for step in range(200):
        found.write(step=step, loss=1.0, text="x" * 100)
    found.close()
    fill(disk)
    rewind(disk, 99)
    assert [m["step"] for m in metrics(disk)] == list(range(100))
