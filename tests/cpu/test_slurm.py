"""Ranks that somebody else started: tasks of a real SLURM, and two launchers of torchrun as two machines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.data.pack_tokens import pack
from fullshard.ranks.slurm import PORTS, adopt_slurm, first_host
from tests.cpu.slurm import free_ports, slurm  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]
MODEL = """
from fullshard.on_torch.model.built_in import Llama
from fullshard.model.presets import LlamaSize

def make():
    return Llama(LlamaSize(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=64))
"""
RECIPE = """
plan = "zero3"
[model]
name = "model.py:make"
[data]
path = "tokens"
sequence = 32
[optim]
lr = 1e-3
[train]
steps = 4
global_batch = 8
micro_batch = 2
"""
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A recipe, its model and its data."""
    path = tmp_path_factory.mktemp("joining")
    (path / "model.py").write_text(MODEL)
    (path / "recipe.toml").write_text(RECIPE)
    pack(sorted(Path(json.__file__).parent.glob("*.py")), path / "tokens", workers=1)
    return path


@pytest.fixture(scope="module")
def own(here) -> list[float]:
    """The losses of the same run under `fullshard train`, the oracle."""
    done = subprocess.run(cli("--ranks", "2", "--run", "own"), **options(here), check=False)
    assert done.returncode == 0, done.stderr
    return losses(here / "own")


def cli(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fullshard", "train", "recipe.toml", *arguments]


def options(here: Path, extra: dict[str, str] | None = None) -> dict:
    clean = {k: v for k, v in os.environ.items() if k not in NAMES and not k.startswith("SLURM")}
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {"cwd": here, "env": {**clean, **alone, **(extra or {})}, "text": True, "capture_output": True, "timeout": 120}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


# -- SLURM --------------------------------------------------------------------------------------------


@pytest.mark.full  # where there is a SLURM, it takes a minute; a wrong recipe under srun is quick
def test_tasks_of_srun_on_two_nodes_are_ranks(slurm, here, own):  # noqa: F811
    line = ["srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1", *cli("--run", "srun")]
    done = subprocess.run(line, **options(here, slurm), check=False)
    assert done.returncode == 0, done.stderr
    assert losses(here / "srun") == pytest.approx(own, rel=2e-6)
    assert json.loads((here / "srun/plan.json").read_text())["mesh"]["shard"] == 2


def test_a_wrong_recipe_under_srun_is_one_sentence(slurm, here):  # noqa: F811
    line = ["srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1", *cli("--run", "bad", "optim.lrr=1")]
    done = subprocess.run(line, **options(here, slurm), check=False)
    assert done.returncode != 0  # srun's own choice: the other task has been ended by a signal
    assert done.stderr.count("error: recipe.toml: unknown key optim.lrr") == 1
    assert "Traceback" not in done.stderr
    assert not (here / "bad").exists()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-010,012],login", "gpu003"),
        ("node1,node2", "node1"),
        ("node[7,9]", "node7"),
        ("rack[1-2]-node[3-4]", "rack1-node3"),
        ("a-b-01", "a-b-01"),
        ("", ""),
    ],
)
def test_the_first_name_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_the_first_name_is_what_scontrol_says(slurm):  # noqa: F811
    for nodes in ("gpu[003-010,012],login", "rack[1-2]-node[3-4]"):
        line = ["scontrol", "show", "hostnames", nodes]
        shown = subprocess.check_output(line, env={**os.environ, **slurm}, text=True)
        assert first_host(nodes) == shown.split()[0]


TASK = {
    "SLURM_STEP_ID": "3",
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}


@pytest.fixture
def task(monkeypatch):
    """`task(**changes)`: this process as a task of a step; None takes a variable away."""
    for name in [n for n in os.environ if n.startswith("SLURM") or n in NAMES]:
        monkeypatch.delenv(name)

    def set_task(**changes: str | None) -> None:
        for name, value in {**TASK, **changes}.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    yield set_task
    for name in NAMES:  # adopt_slurm's own, which monkeypatch does not know
        os.environ.pop(name, None)


def test_a_task_becomes_a_rank(task):
    task()
    assert adopt_slurm()
    assert {n: os.environ[n] for n in NAMES[:4]} == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
    }
    assert int(os.environ["MASTER_PORT"]) in PORTS
    assert not adopt_slurm()  # it is a rank already


@pytest.mark.parametrize(
    "changes",
    [{"SLURM_STEP_ID": None}, {"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}],
    ids=["a batch script", "a step of one task", "a rank of torchrun"],
)
def test_what_is_no_task_among_several_is_left_alone(task, changes):
    task(**changes)
    before = dict(os.environ)
    assert not adopt_slurm()
    assert dict(os.environ) == before


def test_what_was_set_by_hand_stays(task):
    task(MASTER_ADDR="elsewhere", MASTER_PORT="1234")
    assert adopt_slurm()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("elsewhere", "1234")


def test_a_first_node_whose_name_does_not_resolve_gives_way_to_the_address_of_srun(task):
    task(SLURM_STEP_NODELIST="no-such-host[1-2].invalid")
    assert adopt_slurm()
    assert os.environ["MASTER_ADDR"] == "10.0.0.7"


def test_steps_at_the_same_time_have_ports_of_their_own(task):
    ports = set()
    for step in range(8):
        task(SLURM_STEP_ID=str(step))
        adopt_slurm()
        ports.add(os.environ["MASTER_PORT"])
        for name in NAMES:
            del os.environ[name]
    assert len(ports) == 8


# -- torchrun -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_two_launchers_are_two_machines(here, own):
    (port,) = free_ports(1)
    given = options(here)
    given.pop("timeout"), given.pop("capture_output")

    def launch(node: int) -> subprocess.Popen:
        where = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        target = ["-m", "--", "fullshard", "train", "recipe.toml", "plan.strategy=hybrid", "plan.replicate=2", "--run", "two"]
        line = [sys.executable, "-m", "torch.distributed.run", *where, *target]
        return subprocess.Popen(line, **given, stderr=subprocess.PIPE)

    machines = [launch(node) for node in (0, 1)]
    try:
        said = [machine.communicate(timeout=100)[1] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert losses(here / "two") == pytest.approx(own, rel=2e-6)
    assert json.loads((here / "two/plan.json").read_text())["mesh"]["replicate"] == 2
