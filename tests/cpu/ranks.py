"""Real ranks over gloo that stay alive between tests: importing torch takes longer than most tests."""

import faulthandler
import gc
import multiprocessing as mp
import os
import tempfile
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path

TIMEOUT = 240  # seconds a call may take before its ranks are taken for hung
PRELOADED = ["fullshard.on_torch", "torch._dynamo", "peft"]  # by the server that ranks on a CPU are forks of


def preloaded() -> BaseContext:
    """Where a process starts as a fork of a server that has imported torch."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankError(AssertionError):
    """What a rank raised, with the rank's traceback."""


class Ranks:
    """`world` processes in one process group; `run` calls a module-level function on all of them."""

    def __init__(self, world: int, device: str = "cpu"):
        self.world, self.device = world, device
        self.processes: list = []

    def run(self, function, *args, **kwargs) -> list:
        """The results of all ranks. A rank that raises, dies or hangs fails the call and ends the group."""
        self._start()
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        results: dict[Connection, tuple] = {}
        while len(results) < self.world:
            ready = wait([p for p in self.pipes if p not in results], TIMEOUT)
            failed = [str(r[1]) for r in results.values() if not r[0]]
            if not ready:
                self.stop()
                raise RankError("ranks hang; so far: " + ("\n".join(failed) or "no error"))
            for pipe in ready:
                try:
                    results[pipe] = pipe.recv()
                except EOFError:
                    raise RankError(self._death(self.pipes.index(pipe))) from None
            if any(not r[0] for r in results.values()) and len(results) < self.world:
                # The others may wait for the failed one in a collective: give them a moment, then stop.
                late = [p for p in self.pipes if p not in results]
                if not wait(late, 20):
                    failed = [str(r[1]) for r in results.values() if not r[0]]
                    self.stop()
                    raise RankError("\n".join(failed))
        answers = [results[p] for p in self.pipes]
        errors = [a[1] for a in answers if not a[0]]
        if errors:
            self.stop()
            raise RankError("\n".join(errors))
        return [a[1] for a in answers]

    def _start(self) -> None:
        if self.processes:
            return
        context = preloaded() if self.device == "cpu" else mp.get_context("spawn")  # CUDA does not outlive a fork
        self.directory = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, self.device, self.directory.name, there), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def _death(self, rank: int) -> str:
        """How a rank ended, and where its threads stood. Ends the group."""
        self.processes[rank].join(10)
        code, stacks = self.processes[rank].exitcode, Path(f"{self.directory.name}/died-{rank}").read_text()
        self.stop()
        return f"{stacks}rank {rank} died with exit code {code}"

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        if self.processes:
            self.directory.cleanup()
        self.processes = []


def _serve(rank: int, world: int, device: str, directory: str, pipe: Connection) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank), "FULLSHARD_TEST_DEVICE": device}
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    faulthandler.enable(Path(directory, f"died-{rank}").open("w"))  # noqa: SIM115  open as long as the rank lives
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # modules are never garbage: later collections need not go through them
    mp.current_process().daemon = False  # a run may start data workers
    store = dist.FileStore(f"{directory}/store", world)
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120))
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args, **kwargs)))
        except Exception:
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
