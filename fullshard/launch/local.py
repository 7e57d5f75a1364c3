"""Ranks on this machine: on torch a process for each device, through its elastic launcher; on JAX one process for all."""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from fullshard.base.errors import DIVERGED, LOST, REFUSED
from fullshard.storage.memory_limits import explain_kill, kills

ARGUMENTS = "FULLSHARD_ARGUMENTS"
LAUNCH = "FULLSHARD_LAUNCH"
DEVICES = "FULLSHARD_DEVICES"  # how many of a JAX process's devices are used
SIMULATED = "xla_force_host_platform_device_count"  # an older way to ask for devices on the CPU
STRAGGLE = 10.0  # seconds that ranks may end apart after a signal
FINAL = (0, REFUSED, DIVERGED)  # exit codes that another start would have again


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
    engine: str = "torch",
    command: str = "",
    module: str = "fullshard.commands.cli",
) -> NoReturn:
    """Run `fullshard arguments` on every rank, then exit. `command`: the one that resumes the run. `module`: another one to run,
    which reads `given_arguments`.

    The arguments travel in the environment: torchrun takes options such as --run for its own.
    """
    os.environ[ARGUMENTS] = json.dumps(arguments)
    what = f"{devices} {'device' if engine == 'jax' else 'rank'}{'s' if devices > 1 else ''}"
    os.environ[LAUNCH] = json.dumps(asdict(Launch(what, time.time(), command)))
    print(f"starting {what} …", file=sys.stderr, flush=True)
    if engine == "jax":
        one_process(devices, ["-m", module], restarts)
    torchrun(devices, ["-m", module], restarts)


def given_arguments() -> list[str] | None:
    """The arguments that `become_ranks` passed to this rank, or None."""
    if not (inside_ranks() and ARGUMENTS in os.environ):
        return None
    die_with_parent()
    return json.loads(os.environ[ARGUMENTS])


def launched() -> Launch | None:
    """What `become_ranks` told this rank; None if another launcher started it."""
    return Launch(**json.loads(os.environ[LAUNCH])) if inside_ranks() and LAUNCH in os.environ else None


def die_with_parent() -> None:
    """Ask the kernel to end this process with the one that started it. A rank would otherwise train on beside a resumed run."""
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


def torchrun(ranks: int, target: list[str], restarts: int = 0) -> NoReturn:
    """Run `python target` on every rank, then exit.

    The exit code is 0, that of the rank that failed first, or 128 plus the number of a signal that the ranks obeyed. After a
    failure that a retry may cure, the ranks are started again, up to `restarts` times.

    torch's launcher answers SIGTERM with a traceback and kills ranks after 30 seconds. Here signals go to the ranks, which
    end at a step boundary, and the launcher only watches. Each restart gets a launcher of its own: torch's own restart reuses
    the addresses of dead ranks.
    """
    if "OMP_NUM_THREADS" not in os.environ:  # else torchrun gives every rank one thread, and says so at length
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    arguments = ["--standalone", f"--nproc-per-node={ranks}", "--signals-to-handle=SIGUSR2", *target]
    _start_again(lambda _: _launch(arguments), restarts)


def one_process(devices: int, target: list[str], restarts: int = 0) -> NoReturn:
    """Run `python target` as the only rank, with this many devices of JAX, then exit as `torchrun` does.

    Without an accelerator, the devices are simulated on the CPU.
    """
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", DEVICES: str(devices)}
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if SIMULATED not in flag]
    environment = os.environ | ranks | {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": " ".join(kept)}

    def launch(seen: list[int]) -> int:
        killed = kills()
        code = subprocess.Popen([sys.executable, *target], env=environment, start_new_session=True).wait()
        if seen and code == -signal.SIGTERM:
            print("stopped before the first step; nothing was saved", file=sys.stderr)
            return 128 + signal.SIGTERM
        return code if code >= 0 else _explain_signal(0, -code, killed)

    _start_again(launch, restarts)


def _start_again(launch: Callable[[list[int]], int], restarts: int) -> NoReturn:
    """Launch, again after a failure that a retry may cure, and exit. `launch` gets the list of signals that came."""
    seen = _forward_signals()
    sys.stdout.flush()
    while (code := launch(seen)) not in FINAL and restarts and not seen:
        restarts -= 1
        print(f"the ranks ended with exit code {code} and start again; restarts left: {restarts}", file=sys.stderr)
    sys.exit(128 + seen[-1] if seen else code)


def _launch(arguments: list[str]) -> int:
    """One start of the ranks; its exit code."""
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what a rank said of its end stays the last line
    killed = kills()
    try:
        launcher.run(launcher.parse_args(arguments))
    except ChildFailedError as error:
        return _explain(error.failures, killed)
    return 0


def _forward_signals() -> list[int]:
    """Pass SIGTERM and Ctrl-C on to the ranks. Yields a list of the signals that came.

    A terminal's Ctrl-C reaches only the launcher, since torch gives every rank a session of its own. The first signal goes on
    as SIGTERM, which also ends a rank that still imports torch, without a traceback. A second Ctrl-C goes on as it is and
    ends the ranks at once.
    """
    seen: list[int] = []

    def forward(number: int, frame: object) -> None:
        ranks = _children()
        if not ranks:  # none has started, and none shall
            sys.exit(128 + number)
        for rank in ranks:
            os.kill(rank, number if seen else signal.SIGTERM)
        if not seen:
            threading.Thread(target=_end_stragglers, args=(ranks,), daemon=True).start()
        seen.append(number)

    for name in (signal.SIGTERM, signal.SIGINT):
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


def _explain(failures: "dict[int, ProcessFailure]", killed: dict[str, int]) -> int:  # type: ignore[name-defined]  # noqa: F821
    """The exit code of the rank that failed first. Says so for a rank that was killed. `killed`: the kernel's counts from
    before.
    """
    rank = min(failures, key=lambda r: (_standing(failures[r].exitcode), failures[r].timestamp, r))
    code = failures[rank].exitcode
    return code if code >= 0 else _explain_signal(rank, -code, killed)


def _explain_signal(rank: int, number: int, killed: dict[str, int]) -> int:
    """Say that a rank was ended by a signal, and why, as far as the kernel's counts tell. Returns the exit code."""
    name = signal.Signals(number).name
    why = f": {explain_kill(killed)}" if name == "SIGKILL" else ""
    print(f"error: rank {rank} was ended by {name}{why}", file=sys.stderr)
    return 128 + number


def _standing(code: int) -> int:
    """Sorts causes before consequences: a rank that reported an error, one that was killed, one that lost its peer."""
    return 2 if code in (LOST, -signal.SIGTERM, -signal.SIGABRT) else 0 if code > 0 else 1
