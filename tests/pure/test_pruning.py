"""Retention and `gc`: only undamaged checkpoints count, and the last undamaged one is never deleted."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.pruning import Inventory, visible_problems
from fullshard.checkpoint.retention import CheckpointSummary, Retention
from fullshard.checkpoint.verify import problems
from fullshard.commands.cli import app
from tests.pure.checkpoints import make


def flip(place: Local) -> None:
    """Flip a bit of the last tensor, which only the checksum shows."""
    file = max(place.path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))


def cut(place: Local) -> None:
    file = max(place.path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def no_json(place: Local) -> None:
    (place.path / "manifest.json").write_bytes(b"{}")


def renamed(place: Local) -> None:
    """Put another step's checkpoint under this name."""
    step = commit.step_of(place.path.name)
    commit.remove(Local(place.path.parent), place.path.name)
    made = make(place.path.parent, step + 50)
    made.path.rename(place.path)


DAMAGES = [flip, cut, no_json, renamed]


@pytest.mark.quick(5)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_for_every_set_of_damaged_ones_the_newest_whole_ones_stay(tmp_path, keep, damage):
    """All 16 combinations of damaged ones among four checkpoints: the newest `keep` undamaged ones stay."""
    for i, chosen in enumerate(itertools.product([False, True], repeat=4)):
        checkpoint_dir = Local(tmp_path / str(i))
        for step, bad in enumerate(chosen, 1):
            place = make(checkpoint_dir.path, step)
            damage(place) if bad else None
        gone = Inventory.of(checkpoint_dir).removable(Retention(last=keep))
        whole = [commit.checkpoint_name(s) for s, bad in enumerate(chosen, 1) if not bad]
        assert [n for n in gone if n in whole] == whole[:-keep]
        # Checkpoints older than the kept ones are deleted without being read, damaged or not.
        assert all(len(whole) >= keep and name < whole[-keep] for name in gone)


def test_what_was_verified_is_not_read_again_but_its_sizes_are(tmp_path, monkeypatch):
    checkpoint_dir = Local(tmp_path)
    known = Inventory.of(checkpoint_dir)
    read = []
    monkeypatch.setattr("fullshard.checkpoint.pruning.problems", lambda place: read.append(place) or problems(place))
    for step in (1, 2, 3):
        make(tmp_path, step)
        known.add(CheckpointSummary(step, 0.0, {}))
    assert known.removable(Retention(last=1)) == ["step-00000001", "step-00000002"]
    assert not read
    cut(checkpoint_dir.child("step-00000003"))
    assert known.removable(Retention(last=1)) == ["step-00000001"]
    assert "bytes instead of" in known.damaged["step-00000003"]


def test_nothing_is_read_while_nothing_goes(tmp_path, monkeypatch):
    make(tmp_path, 1)
    monkeypatch.setattr("fullshard.checkpoint.pruning.problems", lambda place: 1 // 0)
    assert Inventory.of(Local(tmp_path)).removable(Retention(last=1)) == []


def run(*arguments: str):
    return CliRunner().invoke(app, ["checkpoint", *arguments])


def test_gc_counts_whole_ones_and_says_what_it_passed_over(tmp_path):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    flip(Local(tmp_path / "step-00000004"))
    done = run("gc", str(tmp_path), "--keep", "1")
    assert done.exit_code == 0
    assert done.stdout == "step-00000001\nstep-00000002\n"
    assert "step-00000004 stays and does not count: " in done.stderr
    assert "is damaged: its checksum does not match" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert run("gc", str(tmp_path), "--keep", "1").stdout == ""  # the last undamaged one stays
    dry = run("gc", str(tmp_path), "--keep", "1", "--dry-run")
    assert (dry.exit_code, dry.stdout) == (0, "")


@pytest.mark.parametrize("damage", [cut, no_json])
def test_ls_shows_a_damaged_one_as_damaged(tmp_path: Path, damage):
    for step in (1, 2):
        make(tmp_path, step)
    damage(Local(tmp_path / "step-00000002"))
    done = run("ls", str(tmp_path))
    assert done.exit_code == 0
    first, second = done.stdout.splitlines()[-2:]
    assert first.startswith("step-00000001")
    assert "damaged" not in first
    assert second.split()[:2] == ["step-00000002", "damaged"]
    assert "bytes instead of" in second or "is damaged: its checksum does not match" in second
    rows = json.loads(run("ls", str(tmp_path), "--json").stdout)["checkpoints"]
    assert [bool(r["damaged"]) for r in rows] == [False, True]
    assert visible_problems(Local(tmp_path / "step-00000001")) == []
