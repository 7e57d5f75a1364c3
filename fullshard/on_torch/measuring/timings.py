"""Time single operations on this machine. Each function returns seconds, or a rate per second.

Calls are warmed up first. Times on a GPU are medians. Times on the host are means of the fastest third, because other
load only ever adds to them. `measure` decides what to time.
"""

import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

KERNELS = 500  # launches per burst
COLD = 1 << 25  # bytes of operands that calls on a CPU alternate over: more than a core's own caches
BURST, WRITES = 2e-3, 8  # seconds of calls in a burst, and writes of half a GiB (a millisecond in all) before it


def seconds(call: Callable[[], object], device: torch.device, budget: float = 0.2) -> float:
    """The seconds of a call. Repeats it for about `budget` seconds after a warm-up."""
    if device.type == "cuda":
        return _device_seconds(call, budget)
    call()
    repeats = max(3, min(50, int(budget / max(_host_clock(call), 1e-9))))
    return fastest([_host_clock(call) for _ in range(repeats)])


def fastest(times: list[float]) -> float:
    """The mean of the fastest third."""
    return statistics.mean(sorted(times)[: max(1, len(times) // 3)])


def middle(times: list[float]) -> float:
    """The mean without the fastest and the slowest eighth."""
    cut = len(times) // 8
    return statistics.mean(sorted(times)[cut : len(times) - cut])


def _host_clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _device_seconds(call: Callable[[], object], budget: float) -> float:
    """The device's time of a call, in bursts of about two milliseconds with writes to memory between them.

    A training step alternates in the same way. A GPU that only multiplies clocks down from heat, and an idle one clocks
    up. The writes also keep the device busy while calls are queued, so that launch time does not count.
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


def alternate(make: Callable[[], Callable[[], object]], nbytes: int, device: torch.device) -> Callable[[], object]:
    """A call with `nbytes` of operands that are not in a cache, as in a step. On a CPU it alternates over several sets of
    operands. On a GPU the writes between bursts clear the cache."""
    if device.type == "cuda":
        return make()
    calls = itertools.cycle([make() for _ in range(max(1, COLD // nbytes))])
    return lambda: next(calls)()


# -- compute ------------------------------------------------------------------------------------------


def gemm(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype, budget: float) -> float:
    """Seconds of the product of m × k and k × n matrices."""

    def product() -> Callable[[], object]:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        if device.type == "cpu":  # allocating the result takes time on a CPU, so it counts
            return lambda: torch.mm(a, b)
        out = torch.empty(m, n, device=device, dtype=dtype)
        return lambda: torch.mm(a, b, out=out)

    return seconds(alternate(product, 4 * (m * k + k * n), device), device, budget)


def attention(shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype, budget: float) -> tuple[float, float]:
    """Flops per second of causal attention, forward and backward. `shape`: batch, heads, sequence, head dim."""
    batch, heads, sequence, width = shape
    flops = 2.0 * batch * heads * sequence * sequence * width  # two products; causal attention needs half of each

    def forward() -> Callable[[], object]:
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward() -> Callable[[], object]:
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    nbytes = 12 * batch * heads * sequence * width
    times = [seconds(alternate(make, nbytes, device), device, budget) for make in (forward, backward)]
    return flops / times[0], 2.5 * flops / times[1]  # backward has five products, forward two


def pointwise(rows: int, device: torch.device, dtype: torch.dtype, budget: float) -> float:
    """Bytes per second of the pointwise kernels of a transformer block: a gate, a sum, a norm, a rotation with its casts
    and broadcasts, a transposed copy. Every operand of every kernel counts."""
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
    """Seconds per launch of tiny kernels in eager mode, from the fastest of `bursts` bursts."""
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
    """Bytes per second that a copy within one memory reads and writes."""
    source, target = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    return 2 * nbytes / seconds(lambda: target.copy_(source), device, budget)


def pcie(nbytes: int) -> tuple[float, float, float]:
    """Bytes per second between pinned host memory and the device: up, down, and the sum of both at once."""
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

    cpu = torch.device("cpu")  # each call waits for its copies, so the host's clock is right
    up, down, both = (seconds(move(*way), cpu) for way in ((True, False), (False, True), (True, True)))
    return nbytes / up, nbytes / down, 2 * nbytes / both


def adamw(parameters: int, budget: float) -> float:
    """Seconds per parameter of torch's fused AdamW on the host."""
    weight = torch.nn.Parameter(torch.ones(parameters))
    weight.grad = torch.ones(parameters)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)
    return seconds(optimizer.step, torch.device("cpu"), budget) / parameters


# -- collectives --------------------------------------------------------------------------------------


def collective(kind: str, nbytes: int, device: torch.device, repeats: int) -> float:
    """Seconds of one collective over all ranks, for a full tensor of `nbytes`: the median over repeats. A repeat counts by
    its slowest rank on GPUs, and by the mean of the ranks on CPUs, where a different rank is late each time."""
    call = _collective(kind, nbytes // 4, device)
    call()
    times = torch.tensor([_time_on_all_ranks(call, device) for _ in range(repeats)], dtype=torch.float64, device=device)
    if device.type == "cuda":
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return float(times.median())
    dist.all_reduce(times)
    return float(times.median()) / dist.get_world_size()


def _collective(kind: str, elements: int, device: torch.device) -> Callable[[], object]:
    world = dist.get_world_size()
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # torch 2.13 renamed it
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    full = torch.ones(elements // world * world, device=device)
    part = torch.ones(elements // world, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: gather(torch.empty_like(full), part),  # allocates its output, as FSDP does
        "reduce_scatter": lambda: scatter(torch.empty_like(part), full),
        "all_reduce": lambda: dist.all_reduce(full),
        "broadcast": lambda: dist.broadcast(full, 0),
    }
    return calls[kind]


def _compute() -> None:
    """A few milliseconds of compute, as in a step: then gloo's threads are asleep, caches are cold, and ranks are not in
    lockstep."""
    x = torch.ones(1 << 20)
    for _ in range(4):
        torch.mm(x.view(1024, 1024)[:256], x.view(1024, 1024))
        x = x * 1.0


def _time_on_all_ranks(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call that all ranks begin at the same time, until it is done on the device."""
    dist.barrier()
    if device.type == "cpu":
        _compute()
        return _host_clock(call)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
