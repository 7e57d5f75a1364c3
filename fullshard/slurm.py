"""Tasks of a SLURM step as ranks: what torchrun would have put into the environment, from what srun did."""

import os
import re
import socket

PORTS = range(20_000, 28_000)  # below the ports that Linux hands out by itself


def adopt_slurm() -> bool:
    """If this process is one of several tasks that srun started, and nobody made it a rank yet, make it one.

    A step of one task is a shell or a launcher of its own, not a rank.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or 1)
    if "RANK" in os.environ or "SLURM_STEP_ID" not in os.environ or tasks < 2:
        return False
    job = int(os.environ["SLURM_JOB_ID"]) * 31 + int(os.environ["SLURM_STEP_ID"])
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = str(tasks)
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    os.environ.setdefault("MASTER_ADDR", _master())
    os.environ.setdefault("MASTER_PORT", str(PORTS[job % len(PORTS)]))
    return True


def _master() -> str:
    """The first node of the step, where task 0 runs; its name may not resolve, then the address srun gave."""
    first = first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "")
    try:
        socket.getaddrinfo(first, None)
    except OSError:
        return os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    return first


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: `gpu[003-010,012],login` is gpu003."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)  # up to the first comma outside brackets
    assert match is not None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])
