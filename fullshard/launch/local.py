"""Ranks on this machine, through torch's elastic launcher."""

import json
import os
import sys
from typing import NoReturn

ARGUMENTS = "FULLSHARD_ARGUMENTS"


def inside_ranks() -> bool:
    """Whether an outer launcher has made this process a rank already."""
    return "RANK" in os.environ


def become_ranks(ranks: int, arguments: list[str]) -> NoReturn:
    """Replace this process by torchrun, with `fullshard arguments` on every rank.

    The arguments travel in the environment: torchrun takes options such as --run for its own.
    """
    os.environ[ARGUMENTS] = json.dumps(arguments)
    torchrun(ranks, ["-m", "fullshard.cli"])


def torchrun(ranks: int, target: list[str]) -> NoReturn:
    """Replace this process by torchrun, with `python target` on every rank."""
    if "OMP_NUM_THREADS" not in os.environ:  # else torchrun gives every rank one thread, and says so at length
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, *target])


def given_arguments() -> list[str] | None:
    """What `become_ranks` wants this rank to do, if it started it."""
    return json.loads(os.environ[ARGUMENTS]) if inside_ranks() and ARGUMENTS in os.environ else None
