"""Ranks on this machine, through torch's elastic launcher."""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from fullshard.tiers.limits import explain_kill, kills

ARGUMENTS = "FULLSHARD_ARGUMENTS"


def inside_ranks() -> bool:
    """Whether an outer launcher has made this process a rank already."""
    return "RANK" in os.environ


def become_ranks(ranks: int, arguments: list[str]) -> NoReturn:
    """Run `fullshard arguments` on every rank, then exit.

    The arguments travel in the environment: torchrun takes options such as --run for its own.
    """
    os.environ[ARGUMENTS] = json.dumps(arguments)
    torchrun(ranks, ["-m", "fullshard.cli"])


def given_arguments() -> list[str] | None:
    """What `become_ranks` wants this rank to do, if it started it."""
    if not (inside_ranks() and ARGUMENTS in os.environ):
        return None
    _die_with_launcher()
    return json.loads(os.environ[ARGUMENTS])


def _die_with_launcher() -> None:
    """Ranks whose launcher was killed would train on unseen, beside those of whoever resumes the run."""
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


def torchrun(ranks: int, target: list[str]) -> NoReturn:
    """Run `python target` on every rank, then exit: with 0, with the code of the rank that failed first, or, after a
    signal that the ranks obeyed, with 128 and its number.

    torch's launcher would answer SIGTERM with a traceback and kill ranks that take more than 30 seconds to
    end; here signals go to the ranks, which end at a step boundary, and it only watches.
    """
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "OMP_NUM_THREADS" not in os.environ:  # else torchrun gives every rank one thread, and says so at length
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    arguments = ["--standalone", f"--nproc-per-node={ranks}", "--signals-to-handle=SIGUSR2", *target]
    seen, killed = _forward_signals(), kills()
    sys.stdout.flush()
    try:
        launcher.run(launcher.parse_args(arguments))
    except ChildFailedError as error:
        sys.exit(128 + seen[-1] if seen else _explain(error, killed))
    sys.exit(128 + seen[-1] if seen else 0)


def _forward_signals() -> list[int]:
    """Pass SIGTERM and Ctrl-C on to the ranks; the list fills with those that came.

    A terminal's Ctrl-C comes here alone: torch's launcher gives every rank a session of its own. Whatever
    came first goes on as SIGTERM, which asks a rank for the same and ends one that still imports torch without a
    traceback; a second Ctrl-C goes on as it is, and ends the ranks at once.
    """
    seen: list[int] = []

    def forward(number: int, frame: object) -> None:
        ranks = _children()
        if not ranks:  # none has started, and none shall
            sys.exit(128 + number)
        for rank in ranks:
            os.kill(rank, number if seen else signal.SIGTERM)
        seen.append(number)

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, forward)
    return seen


def _children() -> list[int]:
    """The processes that this one started."""
    lists = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return [int(pid) for found in lists for pid in found]


def _explain(error: "ChildFailedError", killed: dict[str, int]) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Say how the first rank failed, unless it has said so itself; the exit code. `killed`: the kernel's counts of before."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        why = f": {explain_kill(killed)}" if name == "SIGKILL" else ""
        print(f"error: rank {rank} was ended by {name}{why}", file=sys.stderr)
        return 128 - failure.exitcode
    return failure.exitcode
