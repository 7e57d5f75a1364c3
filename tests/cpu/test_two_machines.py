"""Two machines as network namespaces, with real torchrun: what is lost, said and left behind when one of them fails."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullshard.checkpoint.commit import checkpoint_name
from fullshard.data.pack_tokens import pack
from tests.cpu.machines import PORT, Machine, torchrun, two_machines, wait_all
from tests.cpu.test_sources import FILE
from tests.cpu.test_sources import RECIPE as SOURCE_RECIPE
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


ENDLESS = ["train.steps=100000", "schedule.kind=constant", "--run", "run"]


def as_task(machine: Machine, node: int, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """A task of SLURM's srun, as its environment tells."""
    step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node-[a-b]"}
    own = {"SLURM_PROCID": str(node), "SLURM_LOCALID": "0"}
    return machine.start(sys.executable, "-m", "fullshard", "train", "recipe.toml", *arguments, **step, **own, **environment)


def wait_for_steps(machines: list[Machine], processes: list["subprocess.Popen[str]"], count: int) -> None:
    path, deadline = machines[0].here / "run/metrics.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < deadline, machines[0].said()
        assert [p.poll() for p in processes] == [None] * len(processes), [m.said() for m in machines]
        time.sleep(0.1)


def saved_step(machine: Machine) -> int:
    """The step at which the run was stopped and saved."""
    *_, last_step, last = metrics(machine.here / "run")
    assert last == {"event": "stopped", "step": last_step["step"]}
    assert (machine.here / f"run/checkpoints/{checkpoint_name(last['step'])}/manifest.json").exists()
    return last["step"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 85)], ids=["SIGTERM", "SIGUSR1"])
def test_tasks_of_srun_save_and_end_with_the_code_of_the_signal_that_one_got(machines, number, code):
    tasks = [as_task(m, node, *ENDLESS) for node, m in enumerate(machines)]
    wait_for_steps(machines, tasks, 3)
    os.kill(rank_of(machines[1]), number)
    assert wait_all(tasks) == [code, code], machines[0].said()
    assert saved_step(machines[0]) < 100000
    assert "error" not in machines[0].said() + machines[1].said()


def rank_of(machine: Machine) -> int:
    """The process that trains."""
    return json.loads((machine.here / "run/ranks" / f"0000{machine.name == 'node-b':d}.json").read_text())["pid"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().split()[3])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_no_torchrun_exits_with_0_after_a_signal_to_one(machines, number):
    handled = [sys.executable, "-m", "torch.distributed.run", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"]
    launchers = [m.start(*handled, *torchrun(node, *ENDLESS)[3:]) for node, m in enumerate(machines)]
    wait_for_steps(machines, launchers, 3)
    os.kill(parent_of(rank_of(machines[1])), number)
    assert 0 not in wait_all(launchers)
    assert saved_step(machines[0]) < 100000
    assert not [pid for m in machines for pid in m.processes()]


# -- orphans ------------------------------------------------------------------------------------------------

BLOCKED = """
class Blocked(Rows):
    def __len__(self):
        return 100000

    def __getitem__(self, i):
        if i > 40:
            import os, time
            open(f"blocked-{os.getpid()}", "w").close()
            time.sleep(600)
        return super().__getitem__(i)
"""
TIMER = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}


@pytest.fixture
def blocked(machines):
    """A run whose data workers block after some steps. `blocked()` starts it; returns its launchers once they do."""
    for machine in machines:
        (machine.here / "own.py").write_text(FILE + BLOCKED)
        (machine.here / "recipe.toml").write_text(SOURCE_RECIPE)
    options = ["data.source=own.py:Blocked", "data.shuffle=false", "data.workers=1", "train.steps=1000", "--run", "run"]

    def start(*more: str) -> list["subprocess.Popen[str]"]:
        launchers = [m.start(*torchrun(node, *options, *more), **TIMER) for node, m in enumerate(machines)]
        wait_for_steps(machines, launchers, 3)
        deadline = time.monotonic() + 60
        while not all([*m.here.glob("blocked-*")] for m in machines):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return launchers

    return start


def wait_for_nobody(machines: list[Machine], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for m in machines for pid in m.processes()]:
        assert time.monotonic() < deadline, [Path(f"/proc/{p}/cmdline").read_text().replace("\0", " ") for p in left]
        time.sleep(0.2)


def the_rank(machines: list[Machine]) -> None:
    os.kill(rank_of(machines[1]), signal.SIGKILL)


def the_launcher(machines: list[Machine]) -> None:
    os.kill(parent_of(rank_of(machines[1])), signal.SIGKILL)


def stop_the_rank(machines: list[Machine]) -> None:
    os.kill(rank_of(machines[1]), signal.SIGSTOP)


@pytest.mark.parametrize("fail", [the_rank, the_launcher, stop_the_rank])
def test_nothing_that_a_run_has_started_outlives_it(machines, blocked, fail):
    """The other machine's launcher, its rank and data workers that block."""
    launchers = blocked("train.hang_seconds=8")
    fail(machines)
    wait_for_nobody(machines, 90)
    assert 0 not in wait_all(launchers)


# -- what is said -------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_on_another_machine_is_named(machines):
    launchers = [m.start(*torchrun(node, *ENDLESS)) for node, m in enumerate(machines)]
    wait_for_steps(machines, launchers, 3)
    pid = rank_of(machines[1])
    os.kill(pid, signal.SIGKILL)
    assert 0 not in wait_all(launchers)
    (said,) = [line for line in machines[0].said().splitlines() if line.startswith("error: ")]
    lost = f"error: rank 0 lost its connection to another rank: rank 1 (process {pid} on node-b) is gone without a word: killed"
    assert said.startswith(lost), said


def test_other_code_of_the_same_version_is_named(machines):
    package = machines[1].here / "other/fullshard"
    shutil.copytree(Path(__file__).parents[2] / "fullshard", package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "on_torch/step/train_step.py").open("a") as file:
        file.write("# another line\n")
    options = ["--run", "run"]
    first = machines[0].start(*torchrun(0, *options))
    second = machines[1].start(*torchrun(1, *options), PYTHONPATH=str(package.parent))
    assert 0 not in wait_all([first, second])
    said = machines[0].said() + machines[1].said()
    assert said.count("error: ") == 1, said
    assert "error: rank 1: the code of fullshard is " in said
    assert "start all ranks, also on node-b, with the same" in said


# -- names and addresses ------------------------------------------------------------------------------------

NAMES = {
    "Debian's own name": (["127.0.1.1 node-a", "127.0.1.1 node-b"], "10.77.0.1"),
    "no name at all": (["", ""], "10.77.0.1"),
    "the first machine by a name that is its own": (["127.0.1.1 node-a", "10.77.0.1 node-a\n127.0.1.1 node-b"], "node-a"),
}


@pytest.mark.parametrize("case", NAMES)
def test_machines_meet_whatever_their_own_names_mean(machines, case):
    machines[0].names, machines[1].names = NAMES[case][0]
    launchers = [m.start(*torchrun(node, "--run", "run", address=NAMES[case][1])) for node, m in enumerate(machines)]
    assert wait_all(launchers, 100) == [0, 0], [m.said() for m in machines]
    assert [m["step"] for m in metrics(machines[0].here / "run")] == [1, 2, 3, 4, 5, 6]


def test_an_interface_that_leads_nowhere_ends_both_machines_with_what_to_set(machines):
    wrong = {"GLOO_SOCKET_IFNAME": "lo"}
    launchers = [m.start(*torchrun(node, "--run", "run"), **wrong) for node, m in enumerate(machines)]
    assert 0 not in wait_all(launchers, 100)
    assert "GLOO_SOCKET_IFNAME" in machines[1].said()


def test_a_port_in_use_and_an_address_without_anybody_are_said_within_seconds(machines):
    taken = machines[0].start(sys.executable, "-c", TAKE, str(PORT))
    where = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT)}
    (machines[0].here / "ready").unlink(missing_ok=True)
    while not (machines[0].here / "ready").exists():
        time.sleep(0.1)
    assert as_task(machines[0], 0, "--run", "run", **where).wait(timeout=60) == 2
    assert f"error: port {PORT} of node-a is in use; set MASTER_PORT to a free one" in machines[0].said()
    taken.kill()
    alone = as_task(machines[1], 1, "--run", "run", MASTER_ADDR="10.77.0.9", MASTER_PORT=str(PORT))
    said, deadline = f"nobody answers at 10.77.0.9:{PORT} yet (", time.monotonic() + 60
    while said not in machines[1].said():
        assert time.monotonic() < deadline, machines[1].said()
        time.sleep(0.2)
    alone.kill()


TAKE = """
import socket, sys, time
taken = socket.create_server(("", int(sys.argv[1])))
open("ready", "w").close()
time.sleep(100)
"""


# -- fewer machines, and more again -------------------------------------------------------------------------

ELASTIC = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=10.77.0.1:{PORT}", "--rdzv-id=run", "--max-restarts=9")


def test_a_run_goes_on_with_one_machine_and_with_both_once_the_other_is_back(machines, tmp_path):
    run, own_store = tmp_path / "run", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = [*ENDLESS[:2], "train.micro_batch=2", "checkpoint.every=20", "--run", str(run), "--resume", "auto"]

    def launch(machine: Machine) -> "subprocess.Popen[str]":
        return machine.start(*torchrun(0, *options, options=ELASTIC), **own_store)

    first, second = [launch(machine) for machine in machines]
    step = wait_for_world(run, 2, 25, first)
    machines[1].end_all()
    second.wait()
    step = wait_for_world(run, 1, step + 30, first)
    second = launch(machines[1])
    step = wait_for_world(run, 2, step + 30, first)
    os.kill(json.loads((run / "ranks/00000.json").read_text())["pid"], signal.SIGTERM)  # a restart, as of preemption
    wait_for_world(run, 2, step + 30, first)
    for machine in machines:
        machine.end_all()
    assert 0 not in wait_all([first, second])
    steps = [m["step"] for m in metrics(run) if "loss" in m]
    assert steps == list(range(1, len(steps) + 1))


def wait_for_world(run: Path, world: int, step: int, launcher: "subprocess.Popen[str]") -> int:
    """Until so many ranks have come to a step. Returns the one under way."""
    deadline = time.monotonic() + 200
    while True:
        assert time.monotonic() < deadline
        assert launcher.poll() is None
        path = run / "ranks/00000.json"
        told = json.loads(path.read_text()) if path.exists() else {"world": 0, "step": 0}
        if told["world"] == world and told["step"] >= step:
            return told["step"]
        time.sleep(0.3)
