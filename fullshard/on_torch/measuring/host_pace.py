"""The host's paces: seconds of what it does to issue a step, timed on blocks so small that the device waits for it.

`launch` is a bare kernel's. `issued` is an operation's of a model, with its module and autograd's part: a row of blocks,
forward and backward, takes ROW of them.
Under remat the host runs Python beside every kernel: `checkpointed` a region, `saved` a tensor, `dispatched` an
operation (`costs.Calls`). A block of a transformer without remat, under full and under selective remat, and a region
with next to nothing inside, tell them apart. The runs take turns, since the pace of a shared machine changes.

Of a GPU's host they are timed on cores that nobody disturbs (`cores`); `together` then tells what a step takes on all of
them as they were. `host_share` is the host as it is now.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.model.presets import LlamaSize
from fullshard.on_torch.measuring.quiet_cores import QuietCores
from fullshard.on_torch.measuring.timings import fastest, launch, middle
from fullshard.on_torch.models.llama import LlamaBlock
from fullshard.on_torch.remat import apply_remat
from fullshard.on_torch.tracing.python_calls import tallied
from fullshard.plan import Remat

ROUNDS, GLANCES, CLOCKED, LEAST = 5, 2, 15, 1e-9
BLOCKS = 6  # as many in a row as let Python's garbage collector have its share
ROW = 624.0  # operations' worth of the host's time: from the same steps as `timeline.ON_GPU`
# A step's work takes so many times as long as that of a row of alike blocks, and where the host is disturbed it slows by so much
# of what such a row slows by: as seen, on quiet cores and wherever the host ran them; why was not looked into.
IN_A_STEP, DISTURBED = 1.22, 0.55
TINY = LlamaSize(dim=16, layers=1, heads=2, kv_heads=1, ffn=32, vocab=8, sequence=8)


def paces(device: torch.device) -> dict[str, float]:
    """`launch`, `checkpointed`, `saved` and `dispatched`, in two or three seconds; of a GPU's host `issued`, and what the clock
    shows over all cores (`toured`). Of a CPU, whose steps its kernels bound, where the process happens to run."""
    if device.type == "cpu":
        return {"launch": launch(device), **remat_paces(device)}
    with QuietCores(issue_clock(device)) as cores:
        remat = {name: IN_A_STEP * seconds for name, seconds in remat_paces(device, before=cores.settle).items()}
        return {"launch": launch(device), **_issued(cores), **remat}


def glance(device: torch.device) -> dict[str, float]:
    """What steps hang on most, in a second; of a CPU nothing."""
    if device.type == "cpu":
        return {}
    with QuietCores(issue_clock(device)) as cores:
        return _issued(cores)


def _issued(cores: QuietCores) -> dict[str, float]:
    undisturbed = fastest([cores.settle() for _ in range(CLOCKED)])
    return {"issued": IN_A_STEP * undisturbed / ROW, "toured": middle(cores.tour)}


def host_share(issued: float, quiet: float, device: torch.device, looks: int = CLOCKED) -> float:
    """How many times as long as a host of this `issued`, of which `quiet` where it is undisturbed, this one takes for a step's
    work now, wherever it runs."""
    clock = issue_clock(device)
    return share_of(statistics.median(clock() for _ in range(looks)), issued, quiet)


def share_of(clocked: float, issued: float, quiet: float = 1.0) -> float:
    """The same by what an `issue_clock` showed."""
    undisturbed = quiet * issued
    return (undisturbed + DISTURBED * (IN_A_STEP * clocked / ROW - undisturbed)) / issued


def issue_clock(device: torch.device) -> Callable[[], float]:
    """What tells, in some ten milliseconds, how long the host takes now to issue a step of a row of blocks."""
    with torch.random.fork_rng(devices=[]):  # weights are drawn, of numbers that a run may have its own use for
        row = _Tiny(lambda: _block(device), "none", device)
    row.step()
    return lambda: fastest([_issue(row.step, device) for _ in range(GLANCES)])


def together(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of looks at different times: the quickest `issued`, to which others only ever add; of what differences tell, the median.
    Then, of a GPU's host, all of them as a step takes on the cores as they were, and what of that they take on a `quiet` one."""
    names = dict.fromkeys(name for look in found for name in look)
    every = {name: [look[name] for look in found if name in look] for name in names}
    own = {name: fastest(seen) if name == "issued" else statistics.median(seen) for name, seen in every.items()}
    if "toured" not in own:
        return own
    del own["toured"]
    share = max(1.0, share_of(statistics.mean(every["toured"]), own["issued"]))
    return {name: share * seconds for name, seconds in own.items()} | {"quiet": 1 / share}


def remat_paces(device: torch.device, before: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Seconds of entering a region (once forward, once again), of a tensor saved in one (each is saved twice), and of an
    operation that goes through the contexts of selective remat. `before` is called before every round."""
    blocks: dict[Remat, _Tiny] = {r: _Tiny(lambda: _block(device), r, device) for r in ("none", "full", "selective")}
    empty: dict[Remat, _Tiny] = {r: _Tiny(_Sine, r, device) for r in ("none", "full")}
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        before()
        for name, clock in _clocks(blocks, empty, device).items():
            times.setdefault(name, []).append(clock())
    found = {name: fastest(taken[1:]) for name, taken in times.items()}
    return _solve(found, blocks["full"].count(), blocks["selective"].count(), empty["full"].count())


def _solve(times: dict[str, float], full: Counter[str], selective: Counter[str], empty: Counter[str]) -> dict[str, float]:
    """Full remat runs a forward again, and is otherwise regions and saved tensors; selective remat is dispatches more."""
    whole = times["full"] - times["none"] - times["forward"]
    little = times["empty full"] - times["empty none"] - times["empty forward"]
    saved = (whole - little) / (full["saved"] - empty["saved"])
    checkpointed = (little - empty["saved"] * saved) / empty["regions"]
    dispatched = (times["selective"] - times["full"]) / selective["dispatched"]
    found = {"checkpointed": checkpointed, "saved": saved, "dispatched": dispatched}
    return {name: max(LEAST, seconds) for name, seconds in found.items()}


def _clocks(blocks: "dict[Remat, _Tiny]", empty: "dict[Remat, _Tiny]", device: torch.device) -> dict[str, Callable[[], float]]:
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
    """Seconds until a call returns, whatever the device has still to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _block(device: torch.device) -> nn.Module:
    return LlamaBlock(TINY).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


class _Sine(nn.Module):
    """Saves one tensor."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x.sin()


class _Tiny:
    """A row of modules under remat, and what the first takes as input."""

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
        """What the host does for remat in one step."""
        calls: Counter[str] = Counter()
        contexts = tallied(self.remat, lambda: calls)
        for module in self.modules:
            module.__dict__["_fullshard_contexts"] = contexts
        self.step()
        for module in self.modules:
            del module.__dict__["_fullshard_contexts"]
        return calls
