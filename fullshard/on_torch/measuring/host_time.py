"""Time what the host does to issue a step, on blocks so small that the device always waits for the host.

`launch` is the time of a bare kernel launch. `issued` is the time of one operation of a model, including its module and
autograd; forward and backward of a row of blocks take `probe_ops` of these (`fullshard.cluster.calibration`).

Remat runs additional Python (`costs.Calls`): `checkpointed` is the time to enter a region, `saved` to save a tensor in
one, `dispatched` to pass an operation through selective remat. They are solved from the times of a block without, with
full and with selective remat, and of an almost empty region. The runs alternate, since the load of a shared machine
changes.

With a GPU, all are timed on quiet cores (`quiet_cores`). `combine` then scales them to the average core. `host_share`
compares the host as it is now with these numbers.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.cluster.calibration import HOPPER
from fullshard.model.presets import LlamaSize
from fullshard.on_torch.measuring.quiet_cores import QuietCores
from fullshard.on_torch.measuring.timings import fastest, launch, middle
from fullshard.on_torch.model.built_in.llama import LlamaBlock
from fullshard.on_torch.parallelize.remat import apply_remat, under_remat
from fullshard.on_torch.tracing.python_calls import counting_contexts
from fullshard.plan.plan import Remat

ROUNDS = 5  # of all remat runs in turn
REPEATS = 2  # steps per reading of the issue clock
READINGS = 15  # of the issue clock
LEAST = 1e-9  # seconds; differences of noisy times may be negative
BLOCKS = 6  # in a row: enough that Python's garbage collector runs as often as in training
TINY = LlamaSize(dim=16, layers=1, heads=2, kv_heads=1, ffn=32, vocab=8, sequence=8)
AVERAGE_CORE = "average_core"  # the key of the issue clock's time on the average core


def time_host(device: torch.device) -> dict[str, float]:
    """`launch`, `checkpointed`, `saved` and `dispatched`, in two or three seconds. With a GPU also those of `time_issue`.

    On a CPU, steps are bound by kernels. There the times are taken on whatever core the process runs on.
    """
    if device.type == "cpu":
        return {"launch": launch(device), **time_remat(device)}
    with QuietCores(issue_clock(device)) as cores:
        remat = {name: HOPPER.in_step_host * seconds for name, seconds in time_remat(device, before=cores.settle).items()}
        return {"launch": launch(device), **_issued(cores), **remat}


def time_issue(device: torch.device) -> dict[str, float]:
    """`issued` and the issue clock's time on the average core, in about a second. Empty for a CPU."""
    if device.type == "cpu":
        return {}
    with QuietCores(issue_clock(device)) as cores:
        return _issued(cores)


def _issued(cores: QuietCores) -> dict[str, float]:
    undisturbed = fastest([cores.settle() for _ in range(READINGS)])
    return {"issued": HOPPER.in_step_host * undisturbed / HOPPER.probe_ops, AVERAGE_CORE: middle(cores.first_times)}


def host_share(issued: float, quiet: float, device: torch.device, looks: int = READINGS) -> float:
    """The time that this host takes now to issue a step, divided by that of a host with this `issued` on its average core.
    `quiet`: that host's time on a quiet core, as a share of `issued`."""
    clock = issue_clock(device)
    return share_of(statistics.median(clock() for _ in range(looks)), issued, quiet)


def share_of(clocked: float, issued: float, quiet: float = 1.0) -> float:
    """As `host_share`, from a reading of the issue clock."""
    undisturbed = quiet * issued
    return (undisturbed + HOPPER.disturbance * (HOPPER.in_step_host * clocked / HOPPER.probe_ops - undisturbed)) / issued


def issue_clock(device: torch.device) -> Callable[[], float]:
    """A function that returns the seconds that the host takes now to issue a row of blocks. A call takes about 10 ms."""
    with torch.random.fork_rng(devices=[]):  # drawing weights must not change the random state of a run
        row = _TinyRow(lambda: _block(device), "none", device)
    row.step()
    return lambda: fastest([_issue(row.step, device) for _ in range(REPEATS)])


def combine(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combine samples from different times: the fastest of `issued`, since other load only adds to it, and the median of the
    others. With a GPU, scales all of them to the average core, and adds `quiet`, the inverse of that factor."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    every = {name: [sample[name] for sample in samples if name in sample] for name in names}
    combined = {name: fastest(times) if name == "issued" else statistics.median(times) for name, times in every.items()}
    if AVERAGE_CORE not in combined:
        return combined
    del combined[AVERAGE_CORE]
    share = max(1.0, share_of(statistics.mean(every[AVERAGE_CORE]), combined["issued"]))
    return {name: share * seconds for name, seconds in combined.items()} | {"quiet": 1 / share}


def time_remat(device: torch.device, before: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Seconds to enter a region, to save a tensor in one, and to pass an operation through selective remat. A region is
    entered, and a tensor saved, in forward and again in the recomputation. `before` is called before every round."""
    blocks: dict[Remat, _TinyRow] = {r: _TinyRow(lambda: _block(device), r, device) for r in ("none", "full", "selective")}
    empty: dict[Remat, _TinyRow] = {r: _TinyRow(_Sine, r, device) for r in ("none", "full")}
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        before()
        for name, clock in _clocks(blocks, empty, device).items():
            times.setdefault(name, []).append(clock())
    found = {name: fastest(taken[1:]) for name, taken in times.items()}
    return _solve(found, blocks["full"].count(), blocks["selective"].count(), empty["full"].count())


def _solve(times: dict[str, float], full: Counter[str], selective: Counter[str], empty: Counter[str]) -> dict[str, float]:
    """Solve for the three times. Full remat adds a second forward, regions and saved tensors. Selective remat adds
    dispatched operations to that."""
    block = times["full"] - times["none"] - times["forward"]
    almost_empty = times["empty full"] - times["empty none"] - times["empty forward"]
    saved = (block - almost_empty) / (full["saved"] - empty["saved"])
    checkpointed = (almost_empty - empty["saved"] * saved) / empty["regions"]
    dispatched = (times["selective"] - times["full"]) / selective["dispatched"]
    found = {"checkpointed": checkpointed, "saved": saved, "dispatched": dispatched}
    return {name: max(LEAST, seconds) for name, seconds in found.items()}


def _clocks(
    blocks: "dict[Remat, _TinyRow]", empty: "dict[Remat, _TinyRow]", device: torch.device
) -> dict[str, Callable[[], float]]:
    calls: dict[str, Callable[[], Any]] = {
        "none": blocks["none"].step,
        "forward": blocks["none"].forward,
        "full": blocks["full"].step,
        "selective": blocks["selective"].step,
        "empty none": empty["none"].step,
        "empty forward": empty["none"].forward,
        "empty full": empty["full"].step,
    }
    return {name: lambda call=call: _issue(call, device) for name, call in calls.items()}  # type: ignore[misc]


def _issue(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds until a call returns on the host, without waiting for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _block(device: torch.device) -> nn.Module:
    return LlamaBlock(TINY).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


class _Sine(nn.Module):
    """An almost empty block: it saves one tensor."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x.sin()


class _TinyRow:
    """A row of tiny modules under remat, with an input."""

    def __init__(self, make: Callable[[], nn.Module], remat: Remat, device: torch.device):
        self.modules, self.remat = [make() for _ in range(BLOCKS)], remat
        dtype = next((p.dtype for p in self.modules[0].parameters()), torch.float32)
        self.x = torch.ones(1, TINY.sequence, TINY.dim, device=device, dtype=dtype, requires_grad=True)
        self.angles = torch.ones(TINY.sequence, TINY.head_dim // 2, device=device)
        for module in self.modules:
            apply_remat(module, remat)

    def forward(self) -> Tensor:
        x = self.x
        for module in self.modules:
            x = module(x, self.angles, self.angles)
        return x

    def step(self) -> None:
        self.forward().sum().backward()

    def count(self) -> Counter[str]:
        """The Python calls of remat in one step."""
        calls: Counter[str] = Counter()
        contexts = counting_contexts(self.remat, lambda: calls)
        with under_remat(self.modules, self.remat, contexts):
            self.step()
        return calls
