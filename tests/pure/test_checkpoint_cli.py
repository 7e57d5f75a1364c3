"""`fullshard checkpoint` on the command line: no torch, no ranks, one sentence for every error."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.commit import lock_run
from fullshard.commands.cli import app
from tests.pure.checkpoints import arrays, make
from tests.pure.test_cli import fullshard, without  # noqa: F401


def invoke(*line: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["checkpoint", *line])
    if isinstance(done.exception, FullshardError):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with three checkpoints."""
    for step in (1, 2, 3):
        make(tmp_path / "run/checkpoints", step, seed=step, cursor=8 * step, metrics={"eval_loss": 1.0 / step})
    return tmp_path / "run"


def test_ls_and_show(run):
    code, out = invoke("ls", str(run), "--json")
    found = json.loads(out)
    assert code == 0
    assert [(c["step"], c["cursor"]) for c in found["checkpoints"]] == [(1, 8), (2, 16), (3, 24)]
    assert "step-00000003" in invoke("ls", str(run))[1]
    shown = json.loads(invoke("show", str(run), "--json")[1])
    assert shown["model.a"]["shape"] == [5, 3]
    assert shown["model.a"]["mean"] == pytest.approx(float(arrays(3)["model.a"].astype(float).mean()))
    assert list(json.loads(invoke("show", str(run), "--tensors", "optimizer.*", "--json")[1])) == ["optimizer.a.step"]
    with pytest.raises(FullshardError, match="has no tensor called 'x'"):
        invoke("show", str(run), "--tensors", "x")


def test_verify_says_what_is_wrong_and_exits_with_1(run):
    assert invoke("verify", str(run), "--all") == (0, "".join(f"{run}/checkpoints/step-0000000{i}: whole\n" for i in (1, 2, 3)))
    file = next((run / "checkpoints/step-00000002").glob("shard*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert invoke("verify", str(run))[0] == 0  # the newest is undamaged
    code, out = invoke("verify", str(run), "--all")
    assert code == 1
    assert f"{file} is damaged: its checksum does not match" in out


def test_diff(run):
    checkpoint_dir = run / "checkpoints"
    assert invoke("diff", str(checkpoint_dir / "step-00000001"), str(checkpoint_dir / "step-00000001"))[0] == 0
    code, out = invoke("diff", str(checkpoint_dir / "step-00000001"), str(checkpoint_dir / "step-00000002"), "--json")
    assert code == 1
    found = {d["name"]: d for d in json.loads(out)}
    gap = np.abs(arrays(1)["model.a"].astype(float) - arrays(2)["model.a"]).max()
    assert found["model.a"]["largest"] == pytest.approx(gap)
    assert "optimizer.a.step" not in found


def test_gc_removes_garbage_and_old_ones_on_request(run):
    checkpoint_dir = run / "checkpoints"
    (checkpoint_dir / ".step-00000009.abcd.partial").mkdir()
    assert invoke("gc", str(run), "--dry-run") == (0, ".step-00000009.abcd.partial\n")
    assert invoke("gc", str(run)) == (0, ".step-00000009.abcd.partial\n")
    assert sorted(os.listdir(checkpoint_dir)) == ["step-00000001", "step-00000002", "step-00000003"]
    invoke("gc", str(run), "--keep", "1")
    assert os.listdir(checkpoint_dir) == ["step-00000003"]


def test_average_export_and_import(run, tmp_path):
    checkpoint_dir = run / "checkpoints"
    with pytest.raises(FullshardError, match="it cannot be averaged"):  # integers that differ
        invoke(
            "average", str(checkpoint_dir / "step-00000001"), str(checkpoint_dir / "step-00000002"), "-o", str(tmp_path / "mean")
        )
    assert not list((tmp_path / "mean").glob("*"))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"model_type": "x"}')
    invoke("export", str(run), "-o", str(tmp_path / "out"), "--config", str(tmp_path / "hf"))
    found = load_file(tmp_path / "out/model.safetensors")
    assert set(found) == {"a", "b"}
    np.testing.assert_array_equal(found["a"], arrays(3)["model.a"])
    invoke("import", str(tmp_path / "out"), "-o", str(tmp_path / "back"), "--step", "7")
    assert [c["step"] for c in json.loads(invoke("ls", str(tmp_path / "back"), "--json")[1])["checkpoints"]] == [7]
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(FullshardError, match="dtype is one of"):
        invoke("export", str(run), "-o", str(tmp_path / "out"), "--config", str(tmp_path / "hf"), "--dtype", "int4")


def test_none_of_it_needs_torch(run, fullshard, without):  # noqa: F811
    for line in ("ls", "show", "verify", "gc"):
        done = fullshard("checkpoint", line, str(run), PYTHONPATH=without)
        assert (done.returncode, "TRIED" in done.stderr) == (0, False), done.stderr


def test_gc_takes_what_a_kill_left_in_the_runs_directory_unless_the_run_lives(run):
    (run / ".metrics.jsonl.partial").write_text("{")
    (run / ".export.0a1b2c3d.partial").mkdir()
    (run / ".export.0a1b2c3d.partial/model.safetensors").write_bytes(b"half")
    (run / ".mine.partial").write_text("a file of the user's own")
    with lock_run(run):
        assert invoke("gc", str(run)) == (0, "")
    said = ".metrics.jsonl.partial\n.export.0a1b2c3d.partial\n"
    assert invoke("gc", str(run), "--dry-run") == (0, said)
    assert invoke("gc", str(run)) == (0, said)
    assert sorted(p.name for p in run.iterdir()) == [".mine.partial", "checkpoints"]
