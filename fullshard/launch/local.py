"""Ranks on this machine: on torch a process for each device, through its elastic agent; on JAX one process for all."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from fullshard.base.errors import DIVERGED, REFUSED, code_of_signal
from fullshard.base.parent_death import die_with_parent
from fullshard.launch.rank_processes import may_fork, run_alone, run_ranks
from fullshard.plan.engine_traits import DEFAULT_ENGINE, TRAITS
from fullshard.runs.stop_signals import ASKING

ARGUMENTS = "FULLSHARD_ARGUMENTS"
LAUNCH = "FULLSHARD_LAUNCH"
DEVICES = "FULLSHARD_DEVICES"  # how many of a JAX process's devices are used
SIMULATED = "xla_force_host_platform_device_count"  # an older way to ask for devices on the CPU
STRAGGLE = 10.0  # seconds that ranks may end apart after a signal
FINAL = (0, REFUSED, DIVERGED, *map(code_of_signal, ASKING))  # exit codes after which no other start is due


@dataclass(frozen=True)
class Launch:
    """What a rank knows of the `become_ranks` that started it: how many ranks, when by `time.time()`, and the command with which
    a person resumes the run."""

    what: str
    since: float
    command: str


def inside_ranks() -> bool:
    """Whether an outer launcher has made this process a rank already."""
    return "RANK" in os.environ


def become_ranks(
    devices: int,
    arguments: list[str],
    restarts: int = 0,
    *,
    engine: str = DEFAULT_ENGINE,
    command: str = "",
    module: str = "fullshard.commands.cli",
    run: Callable[[], object] | None = None,
) -> NoReturn:
    """Run `fullshard arguments` on every rank, then exit. `command`: the one that resumes the run. `module`: another one to run,
    which reads `given_arguments`. `run`: the same as a function, for ranks that are copies of this process.

    The arguments travel in the environment, for the program that reads its own command line.
    """
    os.environ[ARGUMENTS] = json.dumps(arguments)
    one_process = TRAITS[engine].one_process
    what = f"{devices} {'device' if one_process else 'rank'}{'s' if devices > 1 else ''}"
    os.environ[LAUNCH] = json.dumps(asdict(Launch(what, time.time(), command)))
    print(f"starting {what} …", file=sys.stderr, flush=True)
    if one_process:
        start_jax(devices, ["-m", module], restarts)
    start_ranks(devices, run if run and may_fork() else ["-m", module], restarts)


def given_arguments() -> list[str] | None:
    """The arguments that `become_ranks` passed to this rank, or None."""
    if not (inside_ranks() and ARGUMENTS in os.environ):
        return None
    die_with_parent()  # it would otherwise train on beside a resumed run
    return json.loads(os.environ[ARGUMENTS])


def end_with_launcher() -> None:
    """Under an outer torchrun, let its death ask this rank for an end: with a checkpoint, once there is a step to end at."""
    if "TORCHELASTIC_RUN_ID" in os.environ and LAUNCH not in os.environ:
        die_with_parent(by=signal.SIGTERM)


def launched() -> Launch | None:
    """What `become_ranks` told this rank; None if another launcher started it."""
    return Launch(**json.loads(os.environ[LAUNCH])) if inside_ranks() and LAUNCH in os.environ else None


def start_ranks(ranks: int, target: Callable[[], object] | list[str], restarts: int = 0) -> NoReturn:
    """Run `python target` on every rank, or call it in copies of this process, then exit.

    The exit code is 0, that of the rank that failed first, or that of a signal that the ranks obeyed. After a
    failure that a retry may cure, the ranks are started again, up to `restarts` times. Signals go to the ranks, which end at a
    step boundary.
    """
    _start_again(lambda asked: run_ranks(ranks, target, asked), restarts)


def start_jax(devices: int, target: list[str], restarts: int = 0) -> NoReturn:
    """Run `python target` as the only rank, with this many devices of JAX, then exit as `start_ranks` does. It needs no agent.

    Without an accelerator, the devices are simulated on the CPU.
    """
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if SIMULATED not in flag]
    own = {DEVICES: str(devices), "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": " ".join(kept)}
    _start_again(lambda asked: run_alone(target, own, asked), restarts)


def _start_again(launch: Callable[[list[int]], int], restarts: int) -> NoReturn:
    """Launch, again after a failure that a retry may cure, and exit. `launch` gets the list of signals that came."""
    seen = _forward_signals()
    sys.stdout.flush()
    while (code := launch(seen)) not in FINAL and restarts and not seen:
        restarts -= 1
        print(f"the ranks ended with exit code {code} and start again; restarts left: {restarts}", file=sys.stderr)
    sys.exit(code_of_signal(seen[0]) if seen and code else code)


def _forward_signals() -> list[int]:
    """Pass SIGTERM, Ctrl-C and SIGUSR1 on to the ranks. Yields a list of the signals that came.

    A terminal's Ctrl-C reaches only the launcher, since every rank has a session of its own. The first signal goes on
    as SIGTERM, which also ends a rank that still imports torch, without a traceback. A second Ctrl-C goes on as it is and
    ends the ranks at once.
    """
    seen: list[int] = []

    def forward(number: int, frame: object) -> None:
        ranks = _children()
        if not ranks:  # none has started, and none shall
            sys.exit(code_of_signal(number))
        for rank in ranks:
            os.kill(rank, number if seen else signal.SIGTERM)
        if not seen:
            threading.Thread(target=_end_stragglers, args=(ranks,), daemon=True).start()
        seen.append(number)

    for name in ASKING:
        signal.signal(name, forward)
    return seen


def _end_stragglers(ranks: list[int]) -> None:
    """Kill a rank that is still there after a signal has ended the others: it is stopped, or stuck in a driver."""
    while set(_children()) >= set(ranks):
        time.sleep(0.5)
    time.sleep(STRAGGLE)
    for rank in set(_children()) & set(ranks):
        os.kill(rank, signal.SIGKILL)


def _children() -> list[int]:
    """The processes that this one started."""
    lists = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return [int(pid) for found in lists for pid in found]
