"""The share of updates that the CPU does: its speed against that of PCIe, measured while both are busy."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import torch
import torch.distributed as dist

from fullshard.on_torch.offload.updates.cpu_lane import teams
from fullshard.on_torch.offload.updates.worker_threads import WorkerThreads
from fullshard.on_torch.optimizers.adam_update import Rule
from fullshard.on_torch.optimizers.cpu_adam import OnePass
from fullshard.plan.plan import Precision
from fullshard.plan.update_pieces import balanced, low_bit_seconds, update_cores
from fullshard.ranks.local_ranks import ranks_here
from fullshard.storage.pinned_arena import Arena

ELEMENTS = 1 << 26  # of a trial: more than the caches hold
SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.9, "nesterov": False}


def measured_share(device: torch.device, rule: Rule, precision: Precision, streamed: float, sent: int) -> float:
    """From 0 (the GPU updates everything) to 1; the same on all ranks. `streamed`: bytes of state an element over PCIe, each
    way, for an update by the GPU. `sent`: of gradient and new parameter together, for one by the CPU. Without a GPU: half. The
    trial is of fp32 state; an update in few bits takes longer by what is known of its arithmetic."""
    if device.type != "cuda":
        return 0.5
    seconds = torch.tensor(at_once(device, rule), dtype=torch.float64)
    dist.all_reduce(seconds)
    cores, pcie = (seconds / dist.get_world_size()).tolist()
    if precision.low_bit:
        stochastic = precision.rounding == "stochastic"
        cores = max(cores, low_bit_seconds(precision.moment_kind, own_cores(), stochastic=stochastic))
    whole = 4 * (1 + rule.slots)  # bytes each way of the trial
    return balanced(pcie * streamed / whole, cores, pcie * sent / (2 * whole))


def at_once(device: torch.device, rule: Rule) -> tuple[float, float]:
    """Seconds an element of CPU update and of PCIe copies, while both run: they share the host's memory."""
    ended, passes = Event(), 0
    with _copies(device, rule) as both:

        def stream() -> None:
            nonlocal passes
            while not ended.is_set():
                both()
                passes += 1

        beside = Thread(target=stream)
        beside.start()
        start = time.perf_counter()
        cores = cores_seconds(rule)
        ended.set()
        beside.join()
    return cores / ELEMENTS, (time.perf_counter() - start) / max(1, passes) / ELEMENTS


def own_cores() -> int:
    """This rank's share of the machine's cores."""
    return len(os.sched_getaffinity(0)) // ranks_here()


def update_threads() -> int:
    """Cores for the updates of this rank."""
    return update_cores(own_cores())


def cores_seconds(rule: Rule) -> float:
    """Seconds of an update of ELEMENTS by this rank's cores, as the CPU lane does it."""
    state, gradient = [torch.zeros(ELEMENTS) for _ in ("master", *rule.keys)], torch.ones(ELEMENTS)
    size, threads = teams(update_threads())
    update = OnePass(rule, state, gradient, torch.zeros(ELEMENTS, dtype=torch.bfloat16), threads=threads)
    workers, ended, half = WorkerThreads("trial", size), Event(), ELEMENTS // 2
    calls = update.calls([(0, half, 1, SETTINGS), (half, ELEMENTS, 1, SETTINGS)])

    def whole() -> None:
        ended.clear()
        workers.share(update.run, calls, lambda _: ended.set())
        ended.wait()

    try:
        return _best(whole)
    finally:
        workers.close()


@contextmanager
def _copies(device: torch.device, rule: Rule) -> Iterator[Callable[[], None]]:
    nbytes = ELEMENTS * 4 * (1 + rule.slots)
    arena = Arena(2 * nbytes, True, "a trial of PCIe")
    host = [arena.take(nbytes) for _ in range(2)]
    here = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def both() -> None:
        with torch.cuda.stream(up):
            here[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(down):
            host[1].copy_(here[1], non_blocking=True)
        up.synchronize()
        down.synchronize()

    try:
        yield both
    finally:
        arena.close()


def _best(call: Callable[[], None]) -> float:
    times = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[2]  # the first run starts threads and touches pages
