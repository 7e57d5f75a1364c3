"""The file in which a rank tells about itself."""

import json
import os

from fullshard.runs.heartbeat import Heartbeat

TOLD = {"step": 3, "doing": "step 3", "idle": 0.25, "step_seconds": 0.1}


def test_a_rank_tells_now_and_then_and_at_its_end(tmp_path):
    told = Heartbeat(tmp_path / "ranks", rank=1, world=2)
    told.beat(**TOLD)
    told.beat(**TOLD | {"step": 4})  # too soon
    (path,) = (tmp_path / "ranks").iterdir()
    assert path.name == "00001.json"
    found = json.loads(path.read_text())
    assert (found["rank"], found["world"], found["step"], found["ended"], found["pid"]) == (1, 2, 3, False, os.getpid())
    assert found["rss"] > 1 << 20
    told.next = 0.0
    told.beat(**TOLD | {"step": 5})
    assert json.loads(path.read_text())["step"] == 5
    told.beat(**TOLD | {"step": 6}, ended=True)
    assert json.loads(path.read_text())["ended"] is True


def test_many_ranks_write_less_often(tmp_path):
    assert Heartbeat(tmp_path, rank=0, world=8).every == 5.0
    assert Heartbeat(tmp_path, rank=0, world=4096).every == 4096 / 20


def test_what_cannot_be_written_is_said_once(tmp_path, capsys):
    (tmp_path / "ranks").write_text("a file, not a directory")
    told = Heartbeat(tmp_path / "ranks", rank=0, world=1)
    for _ in range(2):
        told.next = 0.0
        told.beat(**TOLD)
    (line,) = capsys.readouterr().err.splitlines()
    assert "the run goes on without it" in line
