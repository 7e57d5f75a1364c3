"""One writer per directory of checkpoints: leases in directories and object stores, broken only when they are stale."""

import dataclasses
import importlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard import FullshardError
from fullshard.checkpoint import commit, lease
from fullshard.checkpoint.directories import Local, open_place
from fullshard.checkpoint.lease import Lease, LeaseLostError, read_leases, take_lease
from fullshard.checkpoint.verify import problems
from fullshard.commands.cli import app
from fullshard.data.pack_tokens import pack
from tests.cpu import checkpoint
from tests.cpu.test_full_disk import Training, steps
from tests.cpu.test_s3 import checkpoint_dir, s3  # noqa: F401
from tests.cpu.test_train import MODEL, RECIPE

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from fullshard.checkpoint import lease
from fullshard.checkpoint.directories import open_place
from fullshard import FullshardError
lease.DYING = float(sys.argv[2])
place = open_place(sys.argv[1])
try:
    held = lease.take_lease(place, "runs/a")
    print("took", flush=True)
    time.sleep(600)
except FullshardError as error:
    print(error, flush=True)
"""
STARTERS = """
import os, sys, time
from fullshard.checkpoint import lease
from fullshard.checkpoint.directories import open_place
from fullshard import FullshardError
if "://" in sys.argv[1]:
    import s3fs  # once, before the forks
start, started = os.pipe()
tell = lambda *words: os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece
for _ in range(5):
    if os.fork():
        continue
    os.close(started)
    place = open_place(sys.argv[1])
    place.files()  # what comes from a store is ready, too
    tell("ready")
    os.read(start, 1)  # until the parent closes its end
    try:
        held = lease.take_lease(place, "runs/a")
        tell(os.getpid(), "took")
        time.sleep(600)
    except FullshardError as error:
        tell(os.getpid(), error)
    os._exit(0)
sys.stdin.readline()
os.close(started)
time.sleep(600)
"""


def hold(where, dying: float = 0.5, **variables: str) -> subprocess.Popen:
    """A process that takes the lease of a directory and prints that it did or why not."""
    line = [sys.executable, "-c", HOLD, str(where), str(dying)]
    return subprocess.Popen(line, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)


@contextmanager
def leased(place) -> Iterator[Lease]:
    taken = take_lease(place)
    try:
        yield taken
    finally:
        taken.release()


@pytest.fixture(params=["directory", "s3"])
def place(request, tmp_path):
    return Local(tmp_path / "checkpoint_dir") if request.param == "directory" else request.getfixturevalue("checkpoint_dir")


def test_a_live_holder_is_named_and_a_killed_one_gives_way_at_once(place, monkeypatch):
    monkeypatch.setattr(lease, "DYING", 0.5)
    holder = hold(place)
    assert holder.stdout.readline() == "took\n"
    with pytest.raises(FullshardError, match=rf"is written to by process {holder.pid} on \S+ \(runs/a\); end that, or write"):
        take_lease(place)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    began = time.monotonic()
    with leased(place) as mine:
        assert time.monotonic() - began < 30
        mine.check()
        assert list(read_leases(place)) == [mine.number] == [2]
    assert read_leases(place) == {}
    assert not place.files()


def test_of_several_starters_one_wins(place):
    """Five processes at the same time, over the lease of one that has ended."""
    dead = dataclasses.replace(lease._this_process("gone"), pid=2**22 - 1)
    if isinstance(place, Local):
        place.path.mkdir()
    assert place.create(lease.lease_name(7), dead.to_bytes())
    line, pipe = [sys.executable, "-c", STARTERS, str(place)], subprocess.PIPE
    parent = subprocess.Popen(line, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    try:
        assert [parent.stdout.readline() for _ in range(5)] == ["ready\n"] * 5
        print(file=parent.stdin, flush=True)
        said = dict(parent.stdout.readline().rstrip().split(" ", 1) for _ in range(5))
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    assert len(said) == 5
    (winner,) = [process for process, words in said.items() if words == "took"]
    assert all(f"by process {winner} on" in words for process, words in said.items() if process != winner)


def test_a_process_of_the_same_number_is_not_the_holder(tmp_path):
    other = dataclasses.replace(lease._this_process("x"), pid=os.getppid(), started="1")  # alive, but started at another time
    Local(tmp_path).create(lease.lease_name(1), other.to_bytes())
    with leased(Local(tmp_path)) as mine:
        assert mine.number == 2


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in (("RENEWAL", 0.3), ("WATCHED", 0.9), ("STALE", 3.0)):
        monkeypatch.setattr(lease, name, seconds)


def elsewhere(place, renewed: float) -> lease.Holder:
    """A lease held by a process of another machine."""
    found = dataclasses.replace(lease._this_process("runs/b"), boot="another", host="far", renewed=renewed)
    if isinstance(place, Local):
        place.path.mkdir(exist_ok=True)
    place.create(lease.lease_name(1), found.to_bytes())
    return found


def test_another_machine_is_watched_whatever_its_clock_says(place, quick):
    """An unchanged lease is broken, an old one sooner. A renewed one is respected, however old it claims to be."""
    for renewed, least in ((time.time() - 100, 0.9), (time.time() + 1000, 3.0)):
        elsewhere(place, renewed)
        began = time.monotonic()
        with leased(place):
            assert least < time.monotonic() - began < least + 20
    found, ended = elsewhere(place, 0.0), threading.Event()

    def renew() -> None:
        beat = 0.0
        while not ended.wait(0.2):
            beat += 1
            place.rewrite(lease.lease_name(1), dataclasses.replace(found, renewed=beat).to_bytes())

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(FullshardError, match=r"is written to by process \d+ on far \(runs/b\)"):
        take_lease(place)
    ended.set()
    thread.join()


def test_a_holder_renews_and_one_that_was_replaced_finds_out(place, quick):
    with leased(place) as mine:
        before = read_leases(place)
        deadline = time.monotonic() + 100
        while read_leases(place) == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        mine.check()
        place.create(lease.lease_name(mine.number + 1), dataclasses.replace(lease._this_process("runs/b"), pid=1).to_bytes())
        with pytest.raises(LeaseLostError, match=r"was taken over by process 1 on \S+ \(runs/b\)"):
            mine.check()
    assert [n for n in read_leases(place) if n != mine.number]  # the other lease stays


def test_half_a_lease_is_no_lease(tmp_path, quick):
    (tmp_path / ".lease-000001").write_bytes(b'{"id"')
    (tmp_path / ".lease-000002.ab12.partial").write_bytes(b"")
    with leased(Local(tmp_path)) as mine:
        assert mine.number == 2
        assert commit.garbage(Local(tmp_path)) == ([".lease-000002.ab12.partial"], [])


def test_a_store_without_conditions_has_one_winner_too(monkeypatch):
    module = importlib.import_module("fullshard.checkpoint.directories")
    monkeypatch.setattr(module, "SETTLING", 0.5)
    import fsspec

    memory = fsspec.filesystem("memory")
    plain = memory.pipe_file
    monkeypatch.setattr(type(memory), "pipe_file", lambda self, path, value, mode="", **_: plain(path, value))
    where, found = open_place(f"memory://{secrets.token_hex(4)}"), []
    threads = [threading.Thread(target=lambda i=i: found.append(where.create("x", b"%d" % i))) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False] * 4 + [True]


def test_a_writer_whose_directory_was_taken_over_neither_writes_nor_deletes(ranks, tmp_path):
    for said in ranks(2).run(checkpoint.taken_over, str(tmp_path / "checkpoint_dir")):
        assert "was taken over by process 1 on" in said["error"]
        assert said["lost"]
    assert commit.committed(Local(tmp_path / "checkpoint_dir")) == ["step-00000001", "step-00000002"]
    assert not [n for n in os.listdir(tmp_path / "checkpoint_dir") if n.startswith(".step-00000003") and "removed" in n]


def test_gc_leaves_the_directory_of_a_live_run_alone(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "DYING", 0.5)
    ranks(2).run(checkpoint.three, str(tmp_path))
    (tmp_path / ".step-00000009.ab.partial").mkdir()
    holder = hold(tmp_path)
    assert holder.stdout.readline() == "took\n"
    done = CliRunner().invoke(app, ["checkpoint", "gc", str(tmp_path), "--keep", "1"])
    assert isinstance(done.exception, FullshardError)
    assert f"is written to by process {holder.pid}" in str(done.exception)
    assert len(commit.committed(Local(tmp_path))) == 3
    assert CliRunner().invoke(app, ["checkpoint", "gc", str(tmp_path)]).stdout == ".step-00000009.ab.partial\n"
    holder.kill()
    holder.wait()
    done = CliRunner().invoke(app, ["checkpoint", "gc", str(tmp_path), "--keep", "1"])
    assert done.exit_code == 0
    assert os.listdir(tmp_path) == ["step-00000003"]


@pytest.mark.full
def test_a_second_run_into_the_same_checkpoints_is_refused_and_the_first_goes_on(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    pack([Path(json.__file__).with_name("scanner.py")], tmp_path / "tokens", workers=1)
    options = ["train.steps=1000000", "schedule.kind=constant", "checkpoint.every=5", "checkpoint.path=shared"]
    first = Training(tmp_path, *options, "--run", "runs/a")
    first.until(lambda: steps(tmp_path / "runs/a") > 12)
    second = Training(tmp_path, *options, "--run", "runs/b", "--resume", "auto")
    assert second.end() == 2, second.said
    sentence = next(line for line in second.said.splitlines() if line.startswith("error: "))
    assert sentence.startswith("error: shared is written to by process ")
    assert sentence.endswith("(runs/a); end that, or write another checkpoint.path")
    reached = steps(tmp_path / "runs/a")
    first.until(lambda: steps(tmp_path / "runs/a") > reached + 12)
    assert first.end(signal.SIGTERM) == 143, first.said
    assert "was not saved" not in first.said
    shared = Local(tmp_path / "shared")
    assert len(commit.committed(shared)) == 2
    assert all(problems(shared.child(n)) == [] for n in commit.committed(shared))
    assert not shared.files()
