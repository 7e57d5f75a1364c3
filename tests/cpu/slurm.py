"""A real SLURM on this machine for the length of a test: a controller and two nodes, all private.

Nothing under /etc is read or written: the munge key and socket, the configuration and all state lie in one
temporary directory. Where the programs are missing or do not come up, tests skip and say why;
FULLSHARD_REQUIRE_SLURM=1 makes that a failure.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
UP = 30  # seconds until both nodes are idle; 2 are usual

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket
CredType=cred/munge
StateSaveLocation={here}/state
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmdSpoolDir={here}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """What to add to the environment of `srun`."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SBIN) is None]
    if missing:
        give_up(f"SLURM is not installed: there is no {', '.join(missing)}")
    with contextlib.ExitStack() as stack:
        here = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)))
        configure(here)
        extra = {"SLURM_CONF": str(here / "slurm.conf")}
        for line in daemons(here):
            stack.callback(end, start(line, here, extra))
        said = wait_until_idle(extra)
        if said:
            give_up(f"SLURM did not come up in {UP} seconds: {said}")
        yield extra


def give_up(why: str) -> None:
    if os.environ.get("FULLSHARD_REQUIRE_SLURM") == "1":
        pytest.fail(why)
    pytest.skip(why)


def configure(here: Path) -> None:
    here.chmod(0o711)  # munge wants its socket to be within everybody's reach
    (here / "state").mkdir()
    (here / "munge.key").write_bytes(os.urandom(128))
    (here / "munge.key").chmod(0o600)
    host, user = socket.gethostname().partition(".")[0], subprocess.check_output(["id", "-un"], text=True).strip()
    (here / "slurm.conf").write_text(CONFIGURATION.format(here=here, host=host, user=user, ports=free_ports(3)))


def daemons(here: Path) -> list[list[str]]:
    """All in the foreground: their processes are this one's to end."""
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    munge = [f"--{option}={here}/{name}" for option, name in {**names, "seed-file": "munge.seed"}.items()]
    return [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-c", "-N", "node1"],
        ["slurmd", "-D", "-c", "-N", "node2"],
    ]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def start(line: list[str], here: Path, extra: dict[str, str]) -> subprocess.Popen:
    program = shutil.which(line[0], path=SBIN)
    assert program is not None
    with (here / f"{line[0]}.out").open("ab") as out:
        return subprocess.Popen([program, *line[1:]], env={**os.environ, **extra}, stdout=out, stderr=out, cwd=here)


def end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until_idle(extra: dict[str, str]) -> str:
    """Nothing once both nodes are idle; what sinfo says if that does not happen."""
    deadline = time.monotonic() + UP
    while time.monotonic() < deadline:
        line = ["sinfo", "--noheader", "--Node", "--format=%T"]
        done = subprocess.run(line, env={**os.environ, **extra}, capture_output=True, text=True, check=False)
        if done.stdout.split() == ["idle", "idle"]:
            return ""
        time.sleep(0.3)
    return " ".join((done.stdout + done.stderr).split()) or "no answer"
