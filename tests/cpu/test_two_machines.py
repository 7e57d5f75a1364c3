"""Two machines as network namespaces, with real torchrun: what is lost, said and left behind when one of them fails."""

import json
import shutil
from pathlib import Path

import pytest

from fullshard.data.pack_tokens import pack
from tests.cpu.machines import Machine, torchrun, two_machines, wait_all
from tests.cpu.test_train import MODEL, RECIPE, metrics

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("files")
    (path / "model.py").write_text(MODEL)
    (path / "recipe.toml").write_text(RECIPE)
    pack(sorted(Path(json.__file__).parent.glob("*.py")), path / "tokens", workers=1)
    return path


@pytest.fixture
def machines(tmp_path, files):
    for name in ("node-a", "node-b"):
        shutil.copytree(files, tmp_path / name)
    with two_machines(tmp_path) as found:
        yield found


def together(machines: list[Machine], *arguments: str) -> list[int]:
    return wait_all([m.start(*torchrun(node, *arguments)) for node, m in enumerate(machines)])


def test_a_run_does_not_start_over_where_one_machine_has_lost_its_checkpoints(machines):
    options = ["schedule.kind=constant", "checkpoint.every=2", "--run", "run", "--resume", "auto"]
    assert together(machines, *options, "train.steps=4") == [0, 0], machines[0].said()
    assert "run/checkpoints is not shared: node-a and node-b each keep their own part" in machines[0].said()
    first, second = (m.here / "run/checkpoints" for m in machines)
    kept = {p: p.read_bytes() for p in first.rglob("*") if p.is_file()}
    shutil.move(second, second.with_name("away"))
    codes = together(machines, *options, "train.steps=6")
    assert 0 not in codes
    said = machines[0].said() + machines[1].said()
    assert said.count("error: ") == 1
    lost = "no checkpoint in run/checkpoints is whole (run/checkpoints/step-00000004 is not on node-b); bring the missing"
    assert lost in said, said
    assert {p: p.read_bytes() for p in first.rglob("*") if p.is_file()} == kept
    alone = machines[0].start(*torchrun(0, *options, "train.steps=6", options=("--standalone",)))
    assert alone.wait(timeout=100) != 0
    assert "shard-00001-of-00002.safetensors" in machines[0].said(), machines[0].said()
    assert {p: p.read_bytes() for p in first.rglob("*") if p.is_file()} == kept
    shutil.move(second.with_name("away"), second)
    assert together(machines, *options, "train.steps=6") == [0, 0], machines[0].said()
    assert [m["step"] for m in metrics(machines[0].here / "run")] == [1, 2, 3, 4, 5, 6]
