"""Measure this machine with JAX and return it as a cluster, with the nominal numbers of its device.

Each part is independent: if one cannot run, it is left out and a note says why. Several processes time the same part at once.
Each number is that of the slowest process.
"""

import os
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fullshard.base.errors import FullshardError, first_line
from fullshard.cluster.measured import CollectiveKind, MeasuredAttention, MeasuredCollective, MeasuredGemm
from fullshard.cluster.topology import Cluster, Measured
from fullshard.on_jax.model.built_in.nnx_attention import attend
from fullshard.on_jax.offload.memory_kinds import DEVICE, HOST
from fullshard.on_jax.ranks import processes
from fullshard.on_jax.ranks.jax_devices import preset_of
from fullshard.ranks.local_ranks import ranks_here
from fullshard.storage.disk_speed import measured_disk, timed_directory
from fullshard.storage.memory_limits import limits

LARGE, QUICK = 1 << 28, 1 << 25  # bytes of a copy
CALLS = 200  # of a tiny program, to time its dispatch
ACCELERATOR_GEMMS = ((512, 4096, 4096), (2048, 4096, 4096), (8192, 4096, 4096), (8192, 14336, 4096), (16384, 8192, 8192))
CPU_GEMMS = ((64, 256, 256), (512, 256, 256), (512, 512, 512), (1024, 1024, 1024))
SECONDS = ("launch",)  # the slowest process has the largest; of all else the smallest
NOMINAL = (
    "CPU AdamW, host overhead of eager programs and pointwise kernels were not timed: on JAX every step is one compiled program, "
    "so they keep their nominal numbers",
    "the kernel launch is the dispatch of a compiled program",
)


def measure(directory: Path | None = None, quick: bool = False, progress: Callable[[str], None] = lambda part: None) -> Cluster:
    """Time this machine. Returns a cluster with the device's nominal numbers and the measured ones.

    `directory`: where to time the disk, by default the directory of temporary files. `quick`: take less time, less exactly.
    `progress` is called with the name of each part before it runs. Every process gets the same cluster.
    """
    where = timed_directory(directory)
    processes.start()
    device = jax.local_devices()[0]
    preset = preset_of(device.device_kind)
    if preset is None:
        raise FullshardError(
            f"no datasheet of {device.device_kind} is known, and JAX does not time all that the planner needs; measure with "
            "--engine torch"
        )
    found: dict[str, Any] = {"notes": list(NOMINAL)}
    for name, part in _parts(device, where, quick).items():
        progress(name)
        _attempt(name, part, found)
    on_cpu = device.platform == "cpu"
    machine = f"{os.cpu_count()} {platform.machine()} cores, by JAX" if on_cpu else f"{device.device_kind}, by JAX"
    measured = Measured(machine=machine, dtype="fp32" if on_cpu else "bf16", **_slowest(found))
    nominal = Cluster.named(f"{jax.device_count()}x{preset}")
    local = jax.local_device_count() * ranks_here()
    contradicts = jax.device_count() > local or local > nominal.node.devices
    node = replace(nominal.node, devices=local) if contradicts else nominal.node
    return replace(nominal, node=node, measured=measured)


def _parts(device: jax.Device, directory: Path, quick: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    budget, nbytes = (0.05, QUICK) if quick else (0.25, LARGE)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "memory": lambda: _memory(device),
        "matrix products": lambda: _gemms(device, budget),
        "attention": lambda: _attention(device, budget),
        "memory bandwidth": lambda: {"hbm": _copy_rate(nbytes, budget)},
        "dispatch": lambda: {"launch": _dispatch()},
    }
    if device.platform != "cpu":
        parts["host to device and back"] = lambda: _host_copies(device, nbytes // 4, budget)
    parts["host memory bandwidth"] = lambda: {"dram": _dram(nbytes, budget)}
    parts["disk"] = lambda: measured_disk(directory, nbytes // 2, ranks_here())
    if jax.device_count() > 1:
        parts["collectives"] = lambda: _collectives(quick)
    return parts


def _attempt(name: str, part: Callable[[], dict[str, Any]], found: dict[str, Any]) -> None:
    """Run one part. Adds its numbers to `found`, or a note why it failed."""
    try:
        answer = part()
        found["notes"] += answer.pop("notes", [])
        found |= answer
    except (FullshardError, RuntimeError, OSError, ValueError, TypeError) as error:
        found["notes"].append(f"{name} was left out: {first_line(error)}")


def _seconds(run: Callable[[], Any], budget: float) -> float:
    """The median time of a call. The first one, which compiles, does not count."""
    jax.block_until_ready(run())
    times: list[float] = []
    while sum(times) < budget or len(times) < 3:
        begun = perf_counter()
        jax.block_until_ready(run())
        times.append(perf_counter() - begun)
    return median(times)


def _dtype(device: jax.Device) -> Any:
    return jnp.float32 if device.platform == "cpu" else jnp.bfloat16


# -- the parts -------------------------------------------------------------------------------------------------


def _memory(device: jax.Device) -> dict[str, Any]:
    host = min(limit.total for limit in limits()) // ranks_here()
    stats = device.memory_stats() if device.platform != "cpu" else None
    found = {"host_memory": host}
    if device.platform == "cpu":
        return found | {"memory": host}
    return found | ({"memory": int(stats["bytes_limit"])} if stats and "bytes_limit" in stats else {})


def _gemms(device: jax.Device, budget: float) -> dict[str, Any]:
    product = jax.jit(jnp.matmul)

    def timed(m: int, n: int, k: int) -> MeasuredGemm:
        a, b = jnp.ones((m, k), _dtype(device)), jnp.ones((k, n), _dtype(device))
        return MeasuredGemm(m, n, k, _seconds(partial(product, a, b), budget))

    return {"gemms": tuple(timed(*s) for s in (CPU_GEMMS if device.platform == "cpu" else ACCELERATOR_GEMMS))}


def _attention(device: jax.Device, budget: float) -> dict[str, Any]:
    """Forward, and backward with its own forward: JAX compiles both into one program."""
    on_cpu = device.platform == "cpu"
    shapes = [(4, s, 4, 64) for s in (128, 256)] if on_cpu else [(max(1, 8192 // s), s, 32, 128) for s in (1024, 4096, 8192)]
    forward = jax.jit(attend)
    both = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum(), (0, 1, 2)))

    def timed(batch: int, sequence: int, heads: int, width: int) -> MeasuredAttention:
        flops = 2.0 * batch * heads * sequence * sequence * width  # two products; causal attention needs half of each
        q, k, v = jax.random.normal(jax.random.key(0), (3, batch, sequence, heads, width), _dtype(device))
        first, whole = (_seconds(partial(f, q, k, v), budget) for f in (forward, both))
        backward = max(whole - first, whole / 2)
        return MeasuredAttention(width, sequence, flops / first, 2.5 * flops / backward)  # backward has five products

    return {"attention": tuple(timed(*shape) for shape in shapes)}


def _copy_rate(nbytes: int, budget: float) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    x = jnp.ones(nbytes // 4, jnp.float32)
    return 2 * nbytes / _seconds(partial(jax.jit(lambda x: x * 2), x), budget)


def _dispatch() -> float:
    """Seconds from one tiny program to the next."""
    run, x = jax.jit(lambda x: x + 1), jnp.zeros(())

    def calls() -> jax.Array:
        y = x
        for _ in range(CALLS):
            y = run(y)
        return y

    return _seconds(calls, 0.0) / CALLS


def _host_copies(device: jax.Device, nbytes: int, budget: float) -> dict[str, Any]:
    kinds = {memory.kind for memory in device.addressable_memories()}
    if HOST not in kinds:
        raise FullshardError(f"JAX has no {HOST} memory on {device.platform}")
    there, here = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in (HOST, DEVICE))
    on_host = jax.device_put(np.ones(nbytes // 4, np.float32), there)
    on_device = jax.device_put(on_host, here)
    up = nbytes / _seconds(lambda: jax.device_put(on_host, here), budget)
    down = nbytes / _seconds(lambda: jax.device_put(on_device, there), budget)
    both = 2 * nbytes / _seconds(lambda: (jax.device_put(on_host, here), jax.device_put(on_device, there)), budget)
    return {"pcie_up": up, "pcie_down": down, "pcie_both": both}


def _dram(nbytes: int, budget: float) -> float:
    source, target = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
    return 2 * nbytes / _seconds(lambda: np.copyto(target, source), budget)


def _collectives(quick: bool) -> dict[str, Any]:
    """Over all devices of all processes. XLA's broadcast is not timed."""
    on_cpu = jax.default_backend() == "cpu"
    sizes = [1 << e for e in range(14, (22 if on_cpu else 28) - (2 if quick else 0) + 1, 2)]
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    kinds: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce")
    return {"collectives": tuple(_line(kind, sizes, mesh, 0.02 if quick else 0.1) for kind in kinds)}


def _line(kind: CollectiveKind, sizes: list[int], mesh: jax.sharding.Mesh, budget: float) -> MeasuredCollective:
    """The latency and bandwidth of one collective, from its times at several sizes."""
    world = mesh.size
    nodes = -(-world // (jax.local_device_count() * ranks_here()))
    share = 2 * (world - 1) / world if kind == "all_reduce" else (world - 1) / world
    points = [(share * size, _collective(kind, size, mesh, budget)) for size in sizes]
    wire, times = [nbytes for nbytes, _ in points], [seconds for _, seconds in points]
    slope, latency = np.polyfit(wire, times, 1, w=[1 / seconds for seconds in times])
    if latency <= 0 or slope <= 0:  # too noisy for a line: take the fastest time and the largest size
        latency, slope = min(times), times[-1] / wire[-1]
    return MeasuredCollective(kind, world, nodes, float(latency), float(1 / slope))


def _collective(kind: CollectiveKind, nbytes: int, mesh: jax.sharding.Mesh, budget: float) -> float:
    """Seconds of a collective whose whole tensor has so many bytes."""
    split, whole = PartitionSpec("all"), PartitionSpec()
    bodies: dict[str, tuple[Callable[[jax.Array], jax.Array], PartitionSpec, PartitionSpec]] = {
        "all_gather": (lambda x: jax.lax.all_gather(x, "all", tiled=True), split, whole),
        "reduce_scatter": (lambda x: jax.lax.psum_scatter(x, "all", tiled=True), whole, split),
        "all_reduce": (lambda x: jax.lax.psum(x, "all"), whole, whole),
    }
    body, given, returned = bodies[kind]
    count = -(-nbytes // 4 // mesh.size) * mesh.size
    make = jax.jit(lambda: jnp.ones(count, jnp.float32), out_shardings=NamedSharding(mesh, given))
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=given, out_specs=returned, check_vma=False))
    return _seconds(partial(run, make()), budget)


def _slowest(found: dict[str, Any]) -> dict[str, Any]:
    """The numbers for all processes: of every number the slowest one's, of tables and notes this process's."""
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    everyone = processes.ProcessAgreement("measure").gather(numbers)
    worst = {name: max if name in SECONDS else min for name in numbers}
    return found | {"notes": tuple(found["notes"])} | {n: worst[n](f.get(n, numbers[n]) for f in everyone) for n in numbers}
