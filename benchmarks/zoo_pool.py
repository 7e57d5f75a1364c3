"""Two live ranks of the zoo, which train one head after another. What hangs or dies is a result too."""

import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.zoo_rank import RANKS, Job, attempt, line

HEADS = 60  # then fresh processes, which have the memory back
GRACE = 5  # seconds that a rank has when another one has failed: it may wait for that one
PRELOADED = ["fullshard.on_torch", "torch._dynamo", "benchmarks.zoo_libraries", "benchmarks.zoo_models"]  # once, for all ranks
OTHERS = (("train", "fp64"), ("eval", "fp32"), ("eval", "fp64"))  # tried in turn on a head that differs
RESULTS = ("equal", "refused", "differs", "traceback", "not built")


class Pool:
    """Started when there is work, and again after a failure. `limit`: seconds that an attempt may take."""

    def __init__(self, limit: float) -> None:
        self.limit, self.used = limit, 0
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []

    def compared(self, library: str, family: str, name: str) -> dict[str, Any]:
        """The result of one head: in training mode and fp32; if that differs by more than rounding, in fp64 and in evaluation
        mode, where rounding is less."""
        started, job = time.time(), Job(library, family, name)
        first = found = self._described(job)
        for mode, precision in OTHERS if first["result"] == "differs" else ():
            found = self._described(replace(job, mode=mode, precision=precision))
            if found["result"] == "equal":
                found |= {"mode": mode, "precision": precision}
                break
        else:
            found = first
        self.used += 1
        if self.used >= HEADS:
            self.stop()
        return {"mode": "train", "precision": "fp32", **found, "seconds": round(time.time() - started, 1)}

    def _described(self, job: Job) -> dict[str, Any]:
        found = {**self._run(job), "described": "plain"}
        if found["result"] == "refused" and "example=" in found["why"]:
            again = {**self._run(replace(job, example=True)), "described": "example"}
            return again if again["result"] != "refused" else {**again, "plain": found["why"]}
        return found

    def _run(self, job: Job) -> dict[str, Any]:
        """The worst result of the ranks."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send(job)
        answers: dict[Any, dict[str, Any]] = {}
        until = time.time() + self.limit
        while len(answers) < RANKS:
            ready = wait([p for p in self.pipes if p not in answers], max(0.0, until - time.time()))
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    return self._failed(answers, "a rank died")
                if answers[pipe]["result"] in ("refused", "traceback"):
                    until = min(until, time.time() + GRACE)
            if not ready:
                return self._failed(answers, f"no end after {self.limit:g} s")
        return max((answers[p] for p in self.pipes), key=lambda r: RESULTS.index(r["result"]))

    def _failed(self, answers: dict[Any, dict[str, Any]], why: str) -> dict[str, Any]:
        """What a rank that failed said of it; else where the ranks were."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        codes = [process.exitcode for process in self.processes]
        errors = [path.read_text()[-1500:] for path in sorted(Path(self.directory.name).glob("stderr*"))]
        self.stop()
        said = [a for a in answers.values() if a["result"] in ("refused", "traceback")]
        if said:
            return {**said[0], "result": "traceback", "why": f"{said[0]['why']} (one rank only)"}
        return {"result": "traceback", "why": f"{why}, exit codes {codes}", "where": "\n".join(errors)}

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.directory = tempfile.TemporaryDirectory(prefix="zoo-")
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.directory.name, there, self.limit), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        if self.processes:
            self.directory.cleanup()
        self.processes, self.pipes, self.used = [], [], 0


def _serve(rank: int, directory: str, pipe: Connection, limit: float) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    errors = open(f"{directory}/stderr{rank}", "w")  # noqa: SIM115
    os.dup2(errors.fileno(), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, errors)
    import datetime
    import warnings

    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=10 * limit))
    import transformers

    transformers.logging.set_verbosity_error()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(attempt(job))
        except Exception as error:
            pipe.send({"result": "traceback", "why": line(error)})
