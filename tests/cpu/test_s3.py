"""Checkpoints on S3 for real: a server that speaks its protocol, on loopback."""

import json
from pathlib import Path

import pytest

from fullshard.checkpoint import commit
from fullshard.checkpoint.place import open_place
from fullshard.checkpoint.verify import problems
from fullshard.data.pack import pack
from tests.cpu import loop
from tests.cpu.test_train import MODEL, RECIPE, metrics


@pytest.fixture(scope="module")
def s3():
    """The environment that an S3 client needs."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    yield keys | {"AWS_DEFAULT_REGION": "us-east-1"}
    server.stop()


def test_save_kill_resume_and_retention_on_s3(s3, tmp_path, ranks, monkeypatch):
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    pack(sorted(Path(json.__file__).parent.glob("*.py")), tmp_path / "tokens", workers=1)
    shelf = open_place("s3://bucket/run/checkpoints")
    shelf.filesystem.mkdir("bucket")
    options = ["checkpoint.every=2", "train.steps=8", "checkpoint.path=s3://bucket/run/checkpoints"]
    ranks(2).run(loop.with_environment, s3, "run", str(tmp_path), options, "whole")
    want = [m["loss"] for m in metrics(tmp_path / "runs/whole")]
    assert commit.committed(shelf) == ["step-00000006", "step-00000008"]  # keep = 2
    assert all(problems(shelf.child(n)) == [] for n in commit.committed(shelf))
    # A writer that was killed before its manifest, and a checkpoint whose object was damaged.
    shelf.child("step-00000010").write("shard-00000-of-00002.safetensors", b"half")
    shelf.child("step-00000008").write("shard-00000-of-00002.safetensors", b"other")
    assert problems(shelf.child("step-00000008"))
    ranks(2).run(loop.with_environment, s3, "resume", str(tmp_path), options, "whole")
    assert [m["loss"] for m in metrics(tmp_path / "runs/whole")] == want
    assert commit.committed(shelf) == ["step-00000006", "step-00000008"]
    assert commit.garbage(shelf) == ([], [])
    assert all(problems(shelf.child(n)) == [] for n in commit.committed(shelf))
