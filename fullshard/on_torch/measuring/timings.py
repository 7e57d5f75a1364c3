"""Stopwatches for one machine: each function times one thing and returns a number in plain units.

Small, warmed up; medians on a device of its own, on the host the fastest third: whatever else runs there only ever
adds. Knows nothing of clusters; `measure` decides what to ask and puts the answers together.
"""

import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

KERNELS = 500
COLD = 1 << 25  # bytes of operands that calls on a CPU take turns with: more than a core's own caches
BURST, WRITES = 2e-3, 8  # seconds of calls, and writes of half a GiB (about a millisecond in all) before them


def seconds(call: Callable[[], object], device: torch.device, budget: float = 0.2) -> float:
    """Seconds of a call after two to warm up, from repetitions within about `budget` seconds."""
    if device.type == "cuda":
        return _device_seconds(call, budget)
    call()
    repeats = max(3, min(50, int(budget / max(_host_clock(call), 1e-9))))
    return fastest([_host_clock(call) for _ in range(repeats)])


def fastest(times: list[float]) -> float:
    """The mean of the fastest third."""
    return statistics.mean(sorted(times)[: max(1, len(times) // 3)])


def middle(times: list[float]) -> float:
    """The mean without the quickest and the slowest eighth."""
    cut = len(times) // 8
    return statistics.mean(sorted(times)[cut : len(times) - cut])


def _host_clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _device_seconds(call: Callable[[], object], budget: float) -> float:
    """The device's own time in bursts of about two milliseconds with plain writes between them, as a training step
    alternates: a chip that only multiplies grows hot and slow, one that rests is too fast.

    The writes also keep the device busy while the calls are queued, so that the time to launch them does not show.
    """
    busy = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")

    def clock(calls: int, bursts: int) -> list[float]:
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(bursts)]
        for start, end in marks:
            for _ in range(WRITES):
                busy.zero_()
            start.record()
            for _ in range(calls):
                call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 / calls for start, end in marks]

    call()
    one = min(clock(4, 3))
    calls = max(1, min(200, int(BURST / one)))
    return statistics.median(clock(calls, max(3, min(100, int(budget / (one * calls))))))


def in_turn(make: Callable[[], Callable[[], object]], nbytes: int, device: torch.device) -> Callable[[], object]:
    """A call of `nbytes` of operands; on a CPU one of several in turn, so that no cache holds them, as in a step. On a
    GPU the writes between bursts do that."""
    if device.type == "cuda":
        return make()
    calls = itertools.cycle([make() for _ in range(max(1, COLD // nbytes))])
    return lambda: next(calls)()


# -- compute ------------------------------------------------------------------------------------------


def gemm(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype, budget: float) -> float:
    """Seconds of an m × k by k × n product."""

    def product() -> Callable[[], object]:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        if device.type == "cpu":  # where memory for results is found anew each time, and that takes its time
            return lambda: torch.mm(a, b)
        out = torch.empty(m, n, device=device, dtype=dtype)
        return lambda: torch.mm(a, b, out=out)

    return seconds(in_turn(product, 4 * (m * k + k * n), device), device, budget)


def attention(shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype, budget: float) -> tuple[float, float]:
    """Flops a second of causal attention forward and backward; `shape` is batch, heads, sequence, head width."""
    batch, heads, sequence, width = shape
    flops = 2.0 * batch * heads * sequence * sequence * width  # two products, of which causal attention needs half

    def forward() -> Callable[[], object]:
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward() -> Callable[[], object]:
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    nbytes = 12 * batch * heads * sequence * width
    ahead, back = (seconds(in_turn(make, nbytes, device), device, budget) for make in (forward, backward))
    return flops / ahead, 2.5 * flops / back  # backward has five products to forward's two


def pointwise(rows: int, device: torch.device, dtype: torch.dtype, budget: float) -> float:
    """Bytes a second that the small change of a transformer's block moves: a gate, a sum, a norm, a rotation with
    its casts and broadcasts, a transposed copy. Every operand of every kernel counts."""
    width, heads = 2048, 16
    x, gate = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    split = x.view(1, rows, heads, -1).transpose(1, 2)
    angle = torch.randn(rows, width // heads, device=device)
    weight = torch.ones(width, device=device, dtype=dtype)

    def block() -> None:
        F.silu(gate)
        x * gate
        x + gate
        F.rms_norm(x, (width,), weight)
        ((split.float() * angle) + angle).type_as(x)
        split.contiguous()

    item = x.element_size()
    moved = x.numel() * (item * (2 + 3 + 3 + 2) + (item + 4) + 8 + 8 + (4 + item) + 2 * item)
    return moved / seconds(block, device, budget)


def launch(device: torch.device, bursts: int = 9) -> float:
    """Seconds from one tiny kernel to the next, as an eager program issues them: the fastest of so many bursts."""
    x = torch.zeros(8, device=device)

    def burst() -> None:
        for _ in range(KERNELS):
            x.add_(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize()

    burst()
    return fastest([_host_clock(burst) for _ in range(bursts)]) / KERNELS


# -- memory and links ---------------------------------------------------------------------------------


def copy_rate(nbytes: int, device: torch.device, budget: float) -> float:
    """Bytes a second that a copy within one memory reads and writes."""
    source, target = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    return 2 * nbytes / seconds(lambda: target.copy_(source), device, budget)


def pcie(nbytes: int) -> tuple[float, float, float]:
    """Bytes a second from pinned host memory to the device, back, and the sum of both at once."""
    host = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.ones(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def move(up: bool, down: bool) -> Callable[[], None]:
        def call() -> None:
            if up:
                with torch.cuda.stream(streams[0]):
                    device[0].copy_(host[0], non_blocking=True)
            if down:
                with torch.cuda.stream(streams[1]):
                    host[1].copy_(device[1], non_blocking=True)
            torch.cuda.synchronize()

        return call

    cpu = torch.device("cpu")  # each call waits for its copies, so the host's clock sees all of them
    up, down, both = (seconds(move(*way), cpu) for way in ((True, False), (False, True), (True, True)))
    return nbytes / up, nbytes / down, 2 * nbytes / both


def adamw(parameters: int, budget: float) -> float:
    """Seconds a parameter of torch's fused AdamW on the host."""
    weight = torch.nn.Parameter(torch.ones(parameters))
    weight.grad = torch.ones(parameters)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)
    return seconds(optimizer.step, torch.device("cpu"), budget) / parameters


# -- collectives --------------------------------------------------------------------------------------


def collective(kind: str, nbytes: int, device: torch.device, repeats: int) -> float:
    """Seconds of one collective over all ranks, whole tensor `nbytes`: the median of calls, on a GPU of the slowest
    rank, on a CPU of the ranks' mean, because there they come late by turns."""
    call = _collective(kind, nbytes // 4, device)
    call()
    times = torch.tensor([_together(call, device) for _ in range(repeats)], dtype=torch.float64, device=device)
    if device.type == "cuda":
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return float(times.median())
    dist.all_reduce(times)
    return float(times.median()) / dist.get_world_size()


def _collective(kind: str, elements: int, device: torch.device) -> Callable[[], object]:
    world = dist.get_world_size()
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # torch 2.13 renamed it
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    whole = torch.ones(elements // world * world, device=device)
    part = torch.ones(elements // world, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: gather(torch.empty_like(whole), part),  # anew, as FSDP does
        "reduce_scatter": lambda: scatter(torch.empty_like(part), whole),
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[kind]


def _work() -> None:
    """A few milliseconds of a step: after it gloo's threads sleep, caches are others', and ranks are not in step."""
    x = torch.ones(1 << 20)
    for _ in range(4):
        torch.mm(x.view(1024, 1024)[:256], x.view(1024, 1024))
        x = x * 1.0


def _together(call: Callable[[], object], device: torch.device) -> float:
    """One call that all ranks begin at the same time, until it is done on the device."""
    dist.barrier()
    if device.type == "cpu":
        _work()
        return _host_clock(call)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
