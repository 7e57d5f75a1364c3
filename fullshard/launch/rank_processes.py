"""The processes of ranks: torch's elastic agent starts them, and waits for their end.

A rank is a fresh process, or a copy of this one: a fork, which has all imports and what was prepared. Copies are made only where
nothing else runs in this process. A thread of Python's, and the driver of a GPU, would not run in the copy.
"""

import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from fullshard.base.errors import LOST
from fullshard.base.parent_death import die_with_parent
from fullshard.launch.rank_end import end_rank, leave
from fullshard.storage.memory_limits import explain_kill, kills

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch looks for GPUs without starting their driver
THREADS = "OMP_NUM_THREADS"
HERE = "127.0.0.1"
AGENT = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")  # its loggers
ENDING = 1.0  # seconds for a thread of this process to end


def run_ranks(ranks: int, target: Callable[[], object] | list[str], asked: list[int]) -> int:
    """Run `target` on every rank: in a copy of this process, or as `python target`. Returns 0, or the exit code of the rank that
    failed first. `asked`: the signals that came so far."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    for name in [n for n in logging.root.manager.loggerDict if n.startswith(AGENT)]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what a rank said of its end stays the last line
    os.environ.setdefault(THREADS, str(max(1, (os.cpu_count() or 1) // ranks)))
    killed = kills()
    # The store of the agent and the ranks, on a free port, whose server the agent's rendezvous shares. Copies lack the server's
    # thread. They need not have it: it holds no lock of Python's, and a copy never ends the store, which this frame keeps.
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    entry, given = (_become_rank, (target, os.getpid())) if callable(target) else (sys.executable, target)
    try:
        elastic_launch(_config(ranks, store.port), entry)(*given)
        return 0
    except ChildFailedError as error:
        failures = error.failures
        rank = min(failures, key=lambda r: (failures[r].timestamp, _standing(failures[r].exitcode), r))
        code = explain(rank, failures[rank].exitcode, asked, killed)
    gc.collect()  # the failure held a store: the copies of another start could not end its thread
    return code


def _config(ranks: int, port: int) -> Any:
    """What the agent is to do."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="fullshard",
        rdzv_backend="static",
        rdzv_endpoint=f"{HERE}:{port}",
        rdzv_configs={"rank": 0},
        max_restarts=0,  # torch's own would keep the store, full of dead ranks' addresses
        start_method="fork",
        logs_specs=DefaultLogsSpecs(os.devnull),
        signals_to_handle="SIGUSR2",  # others would kill the ranks, which shall end at a step boundary
    )


def run_alone(target: list[str], environment: dict[str, str], asked: list[int]) -> int:
    """Run `python target` as the only rank. Returns as `run_ranks` does."""
    killed, alone = kills(), {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    process = subprocess.Popen([sys.executable, *target], env=os.environ | alone | environment, start_new_session=True)
    return explain(0, process.wait(), asked, killed)


# -- copies ------------------------------------------------------------------------------------------------


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


def _become_rank(run: Callable[[], object], launcher: int) -> None:
    """In the copy: call `run`, as a fresh process would. Torch takes an exception for exit code 1, and waits for ever for a
    process that exits with 0 by itself."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent(launcher)  # it would otherwise train on beside a resumed run
    os.environ.pop(NVML, None)
    _start_afresh()
    try:
        run()
    except Exception as error:
        end_rank(error)
    except SystemExit as end:
        if end.code:
            raise
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # it is done, and only waits for the others


def _start_afresh() -> None:
    """Threads, and random numbers of its own, as in a fresh process."""
    import torch

    torch.set_num_threads(int(os.environ[THREADS]))
    torch.default_generator.seed()
    if numpy := sys.modules.get("numpy"):  # Python's own are seeded anew by every fork
        numpy.random.seed()


# -- the end -----------------------------------------------------------------------------------------------


def explain(rank: int, code: int, asked: list[int], killed: dict[str, int]) -> int:
    """Say that a rank was ended by a signal, given as a negative code, and why, as far as the kernel's counts tell. Returns the
    exit code."""
    if code >= 0:
        return code
    if asked and code == -signal.SIGTERM:
        print("stopped before the first step; nothing was saved", file=sys.stderr)
        return 128 - code
    name = signal.Signals(-code).name
    why = f": {explain_kill(killed)}" if name == "SIGKILL" else ""
    print(f"error: rank {rank} was ended by {name}{why}", file=sys.stderr)
    return 128 - code


def _standing(code: int) -> int:
    """Sorts causes before consequences: a rank that reported an error, one that was killed, one that lost its peer or was asked
    to end."""
    return 2 if code in (LOST, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGABRT) else 0 if code > 0 else 1
