"""Checkpoints on S3, with a server that implements its protocol on loopback."""

import json
import secrets
import socket
from pathlib import Path

import pytest

from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import open_place
from fullshard.checkpoint.verify import problems
from fullshard.commands.cli import main
from fullshard.data.pack_tokens import pack
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
def checkpoint_dir(s3, monkeypatch):
    """A directory of checkpoints in a bucket of its own."""
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    found = open_place(f"s3://bucket-{secrets.token_hex(4)}/chaos/checkpoints")
    found.filesystem.mkdir(found.path.partition("/")[0])
    return found


@pytest.mark.full
@pytest.mark.parametrize("kills", [4, 40])
def test_a_run_that_is_killed_while_it_saves_to_s3_goes_on_to_the_bit(s3, checkpoint_dir, tmp_path, kills):
    """Ranks die by SIGKILL before, within and after each request that a save or retention makes; what must hold then is
    in `tests/cpu/judge.py`."""
    write_recipe(tmp_path, MODEL.replace("layers=2", "layers=1").replace("dim=32", "dim=16"))
    found = carry_out(tmp_path, kills, 0, 2, [f"checkpoint.path={checkpoint_dir}", "checkpoint.every=5"], **s3)
    assert {m.split(" ", 2)[2] for m in found["met"]} >= {*STORE_PHASES}
    assert len(commit.committed(checkpoint_dir)) == 2  # keep = 2


@pytest.mark.full
def test_a_damaged_object_is_passed_over_and_half_an_upload_swept(s3, checkpoint_dir, tmp_path, ranks):
    write_recipe(tmp_path, MODEL)
    options = ["checkpoint.every=2", "train.steps=8", f"checkpoint.path={checkpoint_dir}"]
    ranks(2).run(loop.with_environment, s3, "run", str(tmp_path), options, "whole")
    want = [m["loss"] for m in metrics(tmp_path / "runs/whole")]
    assert commit.committed(checkpoint_dir) == ["step-00000006", "step-00000008"]  # keep = 2
    assert all(problems(checkpoint_dir.child(n)) == [] for n in commit.committed(checkpoint_dir))
    checkpoint_dir.child("step-00000008").write("shard-00000-of-00002.safetensors", b"other")
    assert problems(checkpoint_dir.child("step-00000008"))
    bucket, _, prefix = checkpoint_dir.path.partition("/")
    checkpoint_dir.filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/step-00000010/shard")
    assert len(checkpoint_dir.uploads()) == 1
    ranks(2).run(loop.with_environment, s3, "resume", str(tmp_path), options, "whole")
    assert [m["loss"] for m in metrics(tmp_path / "runs/whole")] == want
    assert commit.committed(checkpoint_dir) == ["step-00000006", "step-00000008"]
    assert commit.garbage(checkpoint_dir) == ([], [])
    assert checkpoint_dir.uploads() == []
    assert all(problems(checkpoint_dir.child(n)) == [] for n in commit.committed(checkpoint_dir))


# -- a store that is not there --------------------------------------------------------------------------------


@pytest.fixture
def refused(monkeypatch, capsys):
    """The error of `fullshard checkpoint show` for a URL, with these environment variables."""

    def run(url: str, **environment: str) -> str:
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(key, raising=False)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr("sys.argv", ["fullshard", "checkpoint", "show", url])
        with pytest.raises(SystemExit) as done:
            main()
        assert done.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


def test_a_bucket_that_does_not_exist(s3, refused):
    said = "error: cannot reach s3://nowhere/x: the bucket does not exist; make it, or write another URL"
    assert refused("s3://nowhere/x", **s3) == said


def test_no_credentials(s3, refused, tmp_path):
    nobody = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    said = refused("s3://bucket/x", AWS_ENDPOINT_URL=s3["AWS_ENDPOINT_URL"], AWS_CONFIG_FILE=str(tmp_path / "none"), **nobody)
    assert said.startswith("error: cannot reach s3://bucket/x: Unable to locate credentials; check")


def test_a_server_that_does_not_answer(s3, refused):
    """A port on loopback without a listener."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        said = refused("s3://bucket/x", **s3 | {"AWS_ENDPOINT_URL": url, "AWS_MAX_ATTEMPTS": "2"})
    assert said.startswith("error: cannot reach s3://bucket/x: Could not connect to the endpoint URL")


def test_a_scheme_that_nobody_knows(refused):
    assert refused("gopher://x") == "error: cannot open gopher://x: Protocol not known: gopher"


def write_recipe(here: Path, model: str) -> None:
    (here / "model.py").write_text(model)
    (here / "recipe.toml").write_text(RECIPE)
    pack([Path(json.__file__).with_name("scanner.py")], here / "tokens", workers=1)
