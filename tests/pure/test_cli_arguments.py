"""Arguments of every wrong kind: one line on stderr, exit code 2, nothing written, no traceback."""

import functools
import os

import pytest

from fullshard import FullshardError
from fullshard.commands.cli import app, refusal, refuse_arguments
from fullshard.data.pack_tokens import pack
from fullshard.runs.run_directory import refuse_path
from tests import command


@pytest.fixture
def fullshard(tmp_path):
    """The command, in a directory with a text, a pipe and a recipe."""
    (tmp_path / "a.txt").write_text("hello")
    os.mkfifo(tmp_path / "pipe")
    text = '[model]\nname="llama-nano"\n[data]\npath="t"\nsequence=8\n[optim]\nlr=1e-3\n[train]\nsteps=1\nglobal_batch=2\n'
    (tmp_path / "r.toml").write_text(text)

    return functools.partial(command.fullshard_here, cwd=tmp_path)


LONG = "a" * 5000
WRONG = [
    (("data", "pack", "a.txt", "-o", "x", "--workers", "-4"), "--workers"),
    (("data", "pack", "a.txt", "-o", "x", "--workers", "9" * 12), "--workers is a number of processes from 1 to 1024"),
    (("data", "pack", "a.txt", "-o", LONG), "File name too long"),
    (("data", "pack", "a.txt", "-o", "a.txt/x"), "Not a directory"),
    (("data", "pack", "", "-o", "x"), "an empty argument follows pack"),
    (("data", "pack", "pipe", "-o", "x"), "there is no file pipe"),
    (("data", "pack", "a.txt", "-o", "x", "--chat", "--template", "/dev/zero"), "there is no chat template /dev/zero"),
    (("data", "show", "a.txt"), "is not a directory of token files"),
    (("explain", "pipe"), "it is a pipe, not a plain file"),
    (("train", "/dev/zero"), "it is a device, not a plain file"),
    (("train", "pipe"), "it is a pipe, not a plain file"),
    (("plan", "llama-nano", "--devices", "9" * 30), "of at most 64 bits"),
    (("plan", "llama-nano", "--cluster", "8xh100", "--sequence", "9" * 30), "of at most 64 bits"),
    (("plan", "llama-nano", "--devices", "9" * 6000), "--devices"),
    (("plan", "llama-nano", "--devices", "2", "--bogus"), "--bogus"),
    (("compare", "7Q", "--cluster", "8xh100"), "'7Q' is no size of a model; write a number with K, M, B or T"),
    (("compare", "llama3-8bb", "--cluster", "8xh100"), "did you mean 'llama3-8b'"),
    (("compare", "llama-nano", "--cluster", "8xh"), "unknown device 'h'"),
    (("units", "\udcff\x1b[2J"), r"unknown model '\udcff\x1b[2J'"),
    (("units", LONG), "unknown model"),
    (("checkpoint", "gc", ".", "--keep", "-3"), "--keep"),
    (("checkpoint", "import", "a.txt", "-o", "x", "--step", "-5"), "--step"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(a)[:60] for a, _ in WRONG])
def test_wrong_arguments(fullshard, tmp_path, arguments, words):
    before = sorted(os.listdir(tmp_path)) or ["a.txt", "pipe", "r.toml"]
    run = fullshard(*arguments)
    assert (run.returncode, run.stdout) == (2, "")
    said = [line for line in run.stderr.splitlines() if not line.endswith(" …")]  # without what it was doing
    assert [line[:7] for line in said] == ["error: "]
    assert words in run.stderr
    assert "Traceback" not in run.stderr
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("run", ["file", "file/below", "a" * 300, "a\0b"])
def test_a_run_that_is_no_directory(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FullshardError, match="give another --run"):
        refuse_path(tmp_path / run)
    refuse_path(tmp_path / "new" / "run")
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_train_refuses_a_run_that_is_a_file(fullshard, tmp_path):
    run = fullshard("train", "r.toml", "--run", "a.txt")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.endswith("error: --run a.txt: a.txt is no directory; give another --run\n")
    assert (tmp_path / "a.txt").read_text() == "hello"


@pytest.mark.parametrize("workers", [-4, 0, 10**9])
def test_workers_in_python(tmp_path, workers):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(FullshardError, match="from 1 to 1024"):
        pack([tmp_path / "a.txt"], tmp_path / "x", workers=workers)


def test_a_fault_of_our_own_is_not_called_the_users():
    assert refusal(ZeroDivisionError("x")) is None
    assert str(refusal(PermissionError(13, "Permission denied", "a"))) == "the system refused a: Permission denied"


def test_a_null_byte_in_a_path():
    with pytest.raises(Exception, match="embedded null byte") as caught:
        app(["explain", "a\0b.json"], standalone_mode=False)
    assert refusal(caught.value)


@pytest.mark.parametrize("argument", ["a\0b", "\ud800"])
def test_an_argument_that_no_file_can_be_called(argument):
    with pytest.raises(FullshardError, match="is no text and no name of a file"):
        refuse_arguments(["checkpoint", "ls", argument])
    refuse_arguments(["checkpoint", "ls", "\udcff", "--prefix", ""])


def test_every_command_refuses_an_unknown_option():
    for name in [c.name or c.callback.__name__ for c in app.registered_commands]:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - typer's own, whose name depends on its version
            app([name, "--no-such-option"], standalone_mode=False)
        assert refusal(caught.value) is not None
