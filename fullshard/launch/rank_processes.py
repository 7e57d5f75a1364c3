"""The processes of ranks: starts them, hosts the store that they meet in, and waits for their end.

A rank is a fresh process, or a copy of this one: a fork, which has all imports and what was prepared. Copies are made only where
nothing else runs in this process. A thread, and the driver of a GPU, would not run in the copy.
"""

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from fullshard.base.errors import LOST
from fullshard.launch.rank_end import end_rank, leave
from fullshard.storage.memory_limits import explain_kill, kills

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch looks for GPUs without starting their driver
THREADS = "OMP_NUM_THREADS"
HERE = "127.0.0.1"
POLL = 0.1  # seconds between looks; what fails within them failed at the same time
STOPPING = 30.0  # seconds for the ranks to end after one failed
ENDING = 1.0  # seconds for a thread of this process to end
Begin = Callable[[dict[str, str]], int]  # begins a rank with these variables; its process


def run_ranks(ranks: int, begin: Begin, asked: list[int], environment: dict[str, str] | None = None, *, meet: bool = True) -> int:
    """Start the ranks and wait for them. Returns 0, or the exit code of the one that failed first. `asked`: the signals that came
    so far. `meet`: in a store that this process hosts."""
    killed, shared = kills(), {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **(environment or {})}
    if THREADS not in os.environ and meet:
        shared[THREADS] = str(max(1, (os.cpu_count() or 1) // ranks))
    with socket.create_server((HERE, 0), backlog=ranks) as server:
        if meet:
            shared |= {"MASTER_ADDR": HERE, "MASTER_PORT": str(server.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        running = {begin(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}): rank for rank in range(ranks)}
        store = _host_store(server) if meet else None  # after the ranks, which shall have no thread of its
        failed = _wait(running)
        del store
    if not failed:
        return 0
    rank = min(failed, key=lambda r: (_standing(failed[r]), r))
    if asked and failed[rank] == -signal.SIGTERM:
        print("stopped before the first step; nothing was saved", file=sys.stderr)
        return 128 + signal.SIGTERM
    return failed[rank] if failed[rank] >= 0 else _explain_signal(rank, -failed[rank], killed)


def _host_store(server: socket.socket) -> object:
    """The store, on a socket where the ranks wait for it already."""
    import torch.distributed as dist

    port = server.getsockname()[1]
    return dist.TCPStore(HERE, port, None, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


# -- the begin ---------------------------------------------------------------------------------------------


def spawned(target: list[str]) -> Begin:
    """Each rank is a fresh `python target`."""

    def begin(environment: dict[str, str]) -> int:
        return os.posix_spawn(sys.executable, [sys.executable, *target], os.environ | environment, setsid=True)

    return begin


def stay_forkable() -> None:
    """Keep out of this process what a copy would miss: the driver of a GPU and, once torch is imported, threads of OpenMP."""
    os.environ.setdefault(NVML, "1")
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def may_fork() -> bool:
    """Whether ranks can be copies of this process."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(ENDING)
    alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
    return alone and "torch" in sys.modules and "jax" not in sys.modules and not _driver_runs()


def _driver_runs() -> bool:
    """Whether the driver of NVIDIA's GPUs was started in this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # it was not even loaded
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_NOT_INITIALIZED


CUDA_NOT_INITIALIZED = 3


def forked(run: Callable[[], object]) -> Begin:
    """Each rank is a copy of this process that calls `run`, and ends with it."""

    def begin(environment: dict[str, str]) -> int:
        launcher = os.getpid()
        return os.fork() or _become_rank(run, environment, launcher)

    return begin


def _become_rank(run: Callable[[], object], environment: dict[str, str], launcher: int) -> NoReturn:
    """In the copy: call `run` as the only thing that this process does. Nothing of the launcher goes on: not its handlers of
    signals, and not what it does at its exit."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with_parent(launcher)
        atexit._clear()
        os.environ.pop(NVML, None)
        os.environ.update(environment)
        _start_afresh()
        run()
        code = 0
    except Exception as error:
        end_rank(error)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    finally:
        with suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        leave(code)


def _start_afresh() -> None:
    """Threads, and random numbers of its own, as in a fresh process."""
    import torch

    torch.set_num_threads(int(os.environ[THREADS]))
    torch.default_generator.seed()
    if numpy := sys.modules.get("numpy"):  # Python's own are seeded anew by every fork
        numpy.random.seed()


def die_with_parent(launcher: int | None = None) -> None:
    """Ask the kernel to end this process with the one that started it. A rank would otherwise train on beside a resumed run."""
    launcher = launcher or os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


# -- the end -----------------------------------------------------------------------------------------------


def _wait(running: dict[int, int]) -> dict[int, int]:
    """Wait for all ranks, given by process. After a failure the others are stopped. Returns the exit codes of the ranks that
    failed by themselves, by rank; of a signal, its negative number."""
    failed: dict[int, int] = {}
    while running and not failed:
        time.sleep(POLL)
        failed = {rank: code for rank, code in _ended(running).items() if code}
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process, number)
        deadline = time.monotonic() + STOPPING
        while running and time.monotonic() < deadline:
            time.sleep(POLL)
            _ended(running)
    return failed


def _ended(running: dict[int, int]) -> dict[int, int]:
    """Take the processes that have ended out of `running`. Returns their exit codes by rank."""
    found = {}
    for process in list(running):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            found[running.pop(process)] = os.waitstatus_to_exitcode(status)
    return found


def _explain_signal(rank: int, number: int, killed: dict[str, int]) -> int:
    """Say that a rank was ended by a signal, and why, as far as the kernel's counts tell. Returns the exit code."""
    name = signal.Signals(number).name
    why = f": {explain_kill(killed)}" if name == "SIGKILL" else ""
    print(f"error: rank {rank} was ended by {name}{why}", file=sys.stderr)
    return 128 + number


def _standing(code: int) -> int:
    """Sorts causes before consequences: a rank that reported an error, one that was killed, one that lost its peer."""
    return 2 if code in (LOST, -signal.SIGTERM, -signal.SIGABRT) else 0 if code > 0 else 1
