"""Checkpoints on S3 for real: a server that speaks its protocol, on loopback."""

import json
import secrets
from pathlib import Path

import pytest

from fullshard.checkpoint import commit
from fullshard.checkpoint.place import open_place
from fullshard.checkpoint.verify import problems
from fullshard.data.pack import pack
from tests.cpu import loop
from tests.cpu.chaos import STORE_PHASES
from tests.cpu.test_chaos import carry_out
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


@pytest.fixture
def shelf(s3, monkeypatch):
    """A directory of checkpoints in a bucket of its own."""
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    found = open_place(f"s3://bucket-{secrets.token_hex(4)}/chaos/checkpoints")
    found.filesystem.mkdir(found.path.partition("/")[0])
    return found


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.full)])
def test_a_run_that_is_killed_while_it_saves_to_s3_goes_on_to_the_bit(s3, shelf, tmp_path, kills):
    """Ranks die by SIGKILL before, within and after each request that a save or retention makes; what must hold then is
    in `tests/cpu/judge.py`."""
    write_recipe(tmp_path, MODEL.replace("layers=2", "layers=1").replace("dim=32", "dim=16"))
    found = carry_out(tmp_path, kills, 0, 2, [f"checkpoint.path={shelf}", "checkpoint.every=5"], **s3)
    assert {m.split(" ", 2)[2] for m in found["met"]} >= {*STORE_PHASES}
    assert len(commit.committed(shelf)) == 2  # keep = 2


def test_a_damaged_object_is_passed_over_and_half_an_upload_swept(s3, shelf, tmp_path, ranks):
    write_recipe(tmp_path, MODEL)
    options = ["checkpoint.every=2", "train.steps=8", f"checkpoint.path={shelf}"]
    ranks(2).run(loop.with_environment, s3, "run", str(tmp_path), options, "whole")
    want = [m["loss"] for m in metrics(tmp_path / "runs/whole")]
    assert commit.committed(shelf) == ["step-00000006", "step-00000008"]  # keep = 2
    assert all(problems(shelf.child(n)) == [] for n in commit.committed(shelf))
    shelf.child("step-00000008").write("shard-00000-of-00002.safetensors", b"other")
    assert problems(shelf.child("step-00000008"))
    bucket, _, prefix = shelf.path.partition("/")
    shelf.filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/step-00000010/shard")
    assert len(shelf.uploads()) == 1
    ranks(2).run(loop.with_environment, s3, "resume", str(tmp_path), options, "whole")
    assert [m["loss"] for m in metrics(tmp_path / "runs/whole")] == want
    assert commit.committed(shelf) == ["step-00000006", "step-00000008"]
    assert commit.garbage(shelf) == ([], [])
    assert shelf.uploads() == []
    assert all(problems(shelf.child(n)) == [] for n in commit.committed(shelf))


def write_recipe(here: Path, model: str) -> None:
    (here / "model.py").write_text(model)
    (here / "recipe.toml").write_text(RECIPE)
    pack([Path(json.__file__).with_name("scanner.py")], here / "tokens", workers=1)
