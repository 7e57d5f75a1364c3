"""How much of the updates of away units the CPU's cores should do: what they reach against what the bus reaches."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import torch
import torch.distributed as dist

from fullshard.on_torch.offload.kernels.adam import Rule
from fullshard.on_torch.offload.kernels.cpu_adam import OnePass
from fullshard.on_torch.offload.updates.cpu import teams
from fullshard.on_torch.offload.updates.threads import Crew
from fullshard.on_torch.ranks import ranks_here
from fullshard.storage.host import Arena
from fullshard.update_pieces import balanced

ELEMENTS = 1 << 26  # of a trial: above the largest caches
SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.9, "nesterov": False}


def measured_share(device: torch.device, rule: Rule, streamed: int, sent: int) -> float:
    """From 0 (all streamed past the GPU) to 1; `streamed`: bytes of state that cross the bus each way for the GPU; `sent`:
    of a gradient and a new parameter, both ways together, for the cores. The same on all ranks. Without a GPU there is
    nothing to balance: half."""
    if device.type != "cuda":
        return 0.5
    seconds = torch.tensor(at_once(device, rule), dtype=torch.float64)
    dist.all_reduce(seconds)
    cores, bus = (seconds / dist.get_world_size()).tolist()
    whole = 4 * (1 + rule.slots)  # bytes each way of the trial
    return balanced(bus * streamed / whole, cores, bus * sent / (2 * whole))


def at_once(device: torch.device, rule: Rule) -> tuple[float, float]:
    """Seconds an element by the cores and over the bus while both work: they share the host's memory."""
    ended, passes = Event(), 0
    with _bus(device, rule) as both:

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


def update_threads() -> int:
    """Cores for the updates of this rank: its share of the machine's, less those for the threads that queue work. The
    host's memory is busy before all cores are."""
    cores = len(os.sched_getaffinity(0)) // ranks_here()
    return max(1, cores - max(2, 3 * cores // 8))


def cores_seconds(rule: Rule) -> float:
    """Of an update of ELEMENTS by this rank's cores, as the lane has it done."""
    state, gradient = [torch.zeros(ELEMENTS) for _ in ("master", *rule.keys)], torch.ones(ELEMENTS)
    size, threads = teams(update_threads())
    update = OnePass(rule, state, gradient, torch.zeros(ELEMENTS, dtype=torch.bfloat16), threads=threads)
    crew, ended, half = Crew("trial", size), Event(), ELEMENTS // 2
    calls = update.calls([(0, half, 1, SETTINGS), (half, ELEMENTS, 1, SETTINGS)])

    def whole() -> None:
        ended.clear()
        crew.share(update.run, calls, lambda _: ended.set())
        ended.wait()

    try:
        return _best(whole)
    finally:
        crew.close()


def bus_seconds(device: torch.device, rule: Rule) -> float:
    """Of the state of ELEMENTS up and down at once, as the lane moves it."""
    with _bus(device, rule) as both:
        return _best(both)


@contextmanager
def _bus(device: torch.device, rule: Rule) -> Iterator[Callable[[], None]]:
    nbytes = ELEMENTS * 4 * (1 + rule.slots)
    arena = Arena(2 * nbytes, True, "a trial of the bus")
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
    return sorted(times[1:])[2]  # the first makes threads and pages
