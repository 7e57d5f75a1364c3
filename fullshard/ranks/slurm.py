"""Makes the tasks of a SLURM step ranks: sets the environment variables of torchrun from those of srun."""

import os
import re
import socket

PORTS = range(20_000, 28_000)  # below Linux's ephemeral ports


def adopt_slurm() -> bool:
    """Make this process a rank if it is one of several tasks of srun and is not a rank yet; return whether it was done.

    The only task of a step is a shell or another launcher, not a rank.
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
    """The first node of the step, on which task 0 runs, or srun's address if the node's name does not resolve."""
    first = first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "")
    try:
        socket.getaddrinfo(first, None)
    except OSError:
        return os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    return first


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: `gpu003` for `gpu[003-010,012],login`."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)  # up to the first comma outside brackets
    assert match is not None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])
