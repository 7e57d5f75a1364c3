"""Two machines on this one: network namespaces with a link between them, each with a host name, hosts and a directory of its own.

Making them takes root and `ip`. Elsewhere tests skip and say why.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PORT = 29_541  # each machine has its own: none is taken
ENTER = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'
RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Machine:
    """`here`: its directory, which no other machine sees. `names`: the lines of its /etc/hosts."""

    space: str
    name: str
    address: str
    here: Path
    names: str

    def start(self, *line: str, **environment: str) -> "subprocess.Popen[str]":
        hosts = self.here / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{self.names}\n")
        clean = {k: v for k, v in os.environ.items() if k not in RANK}
        path = os.pathsep.join([str(ROOT), str(self.here)])
        own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
        inside = [
            "ip",
            "netns",
            "exec",
            self.space,
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            ENTER,
            "sh",
            str(hosts),
            self.name,
        ]
        with (self.here / "said").open("w") as said:
            return subprocess.Popen([*inside, *line], cwd=self.here, env={**clean, **own}, stdout=said, stderr=said, text=True)

    def said(self) -> str:
        return (self.here / "said").read_text()

    def processes(self) -> list[int]:
        """All that run in its namespace."""
        found = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def end_all(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def two_machines(path: Path) -> Iterator[list[Machine]]:
    """node-a at 10.77.0.1 and node-b at 10.77.0.2, with directories below `path`."""
    names = [f"fs{os.getpid()}{letter}" for letter in "ab"]
    machines = [
        Machine(space, f"node-{space[-1]}", f"10.77.0.{i}", path / f"node-{space[-1]}", "") for i, space in enumerate(names, 1)
    ]
    try:
        for machine in machines:
            _ip("netns", "add", machine.space)
        _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for machine in machines:
            machine.here.mkdir(parents=True, exist_ok=True)
            machine.names = "\n".join(f"{m.address} {m.name}" for m in machines)
            _ip("-n", machine.space, "addr", "add", f"{machine.address}/24", "dev", machine.space)
            for device in (machine.space, "lo"):
                _ip("-n", machine.space, "link", "set", device, "up")
        yield machines
    finally:
        for machine in machines:
            with contextlib.suppress(subprocess.CalledProcessError):
                machine.end_all()
                subprocess.run(["ip", "netns", "del", machine.space], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces can be made here: {getattr(error, 'stderr', '') or error}")


def torchrun(node: int, *arguments: str, ranks: int = 1, options: tuple[str, ...] = (), address: str = "10.77.0.1") -> list[str]:
    """torchrun's static rendezvous of two machines, as the guide has it."""
    where = ["--nnodes=2", f"--node-rank={node}", f"--master-addr={address}", f"--master-port={PORT}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *(options or where)]
    return [*launcher, "-m", "--", "fullshard.commands.cli", "train", "recipe.toml", *arguments]


def wait_all(processes: list["subprocess.Popen[str]"], seconds: float = 200) -> list[int]:
    return [process.wait(timeout=seconds) for process in processes]
