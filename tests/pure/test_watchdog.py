"""The watchdog of one process: what it says and does when the main thread stands still, or its directory does."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fullshard.runs.disk_thread import DiskThread
from fullshard.runs.watchdog import Watchdog

SHORT = "import fullshard.runs.watchdog as w; w.AT_ONCE = w.DEAD = w.LAST_WORDS = 0.5; w.ANSWERS = 0.1; w.TICK = 0.05"
WATCHED = """
import os, sys, time
from pathlib import Path
from fullshard.runs.heartbeat import Heartbeat
from fullshard.runs.stop_signals import Signals
run = Path(sys.argv[1])
with w.Watchdog(run, 1.0) as dog, Signals():
    dog.heartbeat = Heartbeat(run / "ranks", 0, 1)
"""


def watched(run, body: str) -> subprocess.Popen:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return subprocess.Popen(
        [sys.executable, "-c", SHORT + WATCHED + lines, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def blocked(tmp_path):
    """A run's directory in which writing about a rank blocks, and reading `pipe`."""
    (tmp_path / "ranks").mkdir()
    os.mkfifo(tmp_path / "ranks/.00000.json.partial")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    "work",
    ["", "dog.begin(3)", "dog.progress = w.Progress('saving a checkpoint', w.SAVING, w.SAVING)"],
    ids=["start", "step", "save"],
)
def test_a_directory_that_blocks_ends_a_process_with_a_sentence(blocked, work):
    process = watched(blocked, f"{work}\nopen(run / 'pipe')")
    _, said = process.communicate(timeout=200)
    (line,) = said.splitlines()
    assert line.startswith("error: nothing went on for ")
    assert f"{blocked} has not answered for " in line
    assert "it is in <module> (<string>:" in line
    assert process.returncode == 4


def test_sigterm_ends_a_save_that_blocks(blocked):
    process = watched(blocked, "dog.seconds = 300.0\nwith dog.saving():\n    print('here', flush=True); open(run / 'pipe')")
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=200)
    assert "in saving a checkpoint" in said
    assert process.returncode == 143


def test_a_signal_after_a_rank_has_failed_ends_without_a_word(tmp_path):
    """The launcher's: what the failed rank has said stays the last line."""
    process = watched(tmp_path, "dog.ranks.failed = lambda: 75\ndog.begin(3)\nprint('here', flush=True); time.sleep(60)")
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (75, "")


def test_a_long_evaluation_that_goes_on_is_no_hang(tmp_path):
    """Its batches take longer together than a step may, and none of them alone."""
    body = "w.FIRST = 1\ndog.begin(1)\nfor _ in dog.each(range(6), 'the evaluation'): time.sleep(0.25)"
    process = watched(tmp_path, body)
    _, said = process.communicate(timeout=200)
    assert (process.returncode, said) == (0, "")


def test_after_a_save_that_fails_the_step_is_watched_again(tmp_path):
    dog = Watchdog(tmp_path, 300.0)
    dog.begin(3)
    with pytest.raises(ValueError, match="planted"), dog.saving():
        raise ValueError("planted")
    assert dog.progress.doing == "step 3"


def test_a_disk_thread_tells_how_long_it_waits():
    disk, gate = DiskThread(), threading.Event()
    assert disk.do(gate.wait)
    time.sleep(0.05)
    assert not disk.do(gate.wait)
    assert not disk.wait(0.01)
    assert disk.taken() > 0.05
    gate.set()
    assert disk.wait(60)
    assert disk.taken() == 0.0
    disk.close()
