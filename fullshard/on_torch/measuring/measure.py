"""Measure this machine and return it as a cluster, with the nominal numbers of its device.

Each part is independent: if one cannot run, it is left out and a note says why. Under torchrun all ranks time the same
part at once, so that shared links count by their share. Each number is that of the slowest rank, because a step waits
for it.
"""

import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.base.errors import FullshardError
from fullshard.cluster.measured import CollectiveKind, MeasuredAttention, MeasuredCollective, MeasuredGemm
from fullshard.cluster.topology import PACES, Cluster, Measured
from fullshard.on_torch.measuring import host_time, pointwise, timings
from fullshard.on_torch.offload.updates.cpu_share import at_once
from fullshard.on_torch.optimizers.adam_update import rule_of
from fullshard.on_torch.ranks.device_meshes import local_world_size, start, world_size
from fullshard.on_torch.ranks.device_presets import measured_cluster
from fullshard.plan.optimizer import AdamW
from fullshard.storage.disk_speed import measured_disk, timed_directory
from fullshard.storage.memory_limits import limits

Progress = Callable[[str], None]
KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
LARGE, QUICK = 1 << 30, 1 << 26  # bytes of a copy or an update; LARGE exceeds the caches of a server
# The slowest rank has the largest of these. All others are rates and sizes, of which it has the smallest.
SECONDS = (*PACES, "adamw", "adamw_beside")

# (m, n, k): tokens by the widths of a layer. The few-token shapes stand for decoding and small batches.
CUDA_GEMMS = (
    (16, 4096, 4096),
    (128, 4096, 4096),
    (512, 4096, 4096),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (2048, 4096, 4096),
    (4096, 4096, 4096),
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (16384, 8192, 8192),
    (8192, 128256, 4096),
)
CPU_GEMMS = (
    (8, 256, 256),
    (64, 256, 256),
    (256, 256, 256),
    (512, 256, 256),
    (512, 512, 512),
    (1024, 512, 512),
    (512, 2048, 512),
    (1024, 1024, 1024),
    (1024, 2048, 1024),
)


def measure(directory: Path | None = None, quick: bool = False, progress: Progress = lambda part: None) -> Cluster:
    """Time this machine. Returns a cluster with the device's nominal numbers and the measured ones.

    `directory`: where to time the disk, by default the directory of temporary files. `quick`: take less time, less
    exactly. `progress` is called with the name of each part before it runs. Collective under torchrun: every rank gets
    the same cluster.
    """
    where = timed_directory(directory)
    device = _device()
    found: dict[str, Any] = {"notes": []}
    host_samples: list[dict[str, float]] = []
    for i, (name, part) in enumerate(_parts(device, where, quick).items()):
        progress(name)
        _attempt(name, part, found)
        sample = host_time.time_host if i % 3 == 0 else host_time.time_issue
        _attempt("host overhead", partial(_sample_host, sample, device, host_samples), found)
    values = _slowest(found)
    return measured_cluster(device, Measured(machine=_machine(device), dtype=_dtype_name(device), **values))


def _device() -> torch.device:
    if "RANK" in os.environ or dist.is_initialized():
        return start()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _attempt(name: str, part: Callable[[], dict[str, Any]], found: dict[str, Any]) -> None:
    """Run one part on all ranks at once. Adds its numbers to `found`, or a note why it failed."""
    if world_size() > 1:
        dist.barrier()
    try:
        answer = part()
        found["notes"] += answer.pop("notes", [])
        found |= answer
    except (FullshardError, RuntimeError, OSError, ValueError, AttributeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        found["notes"].append(f"{name} was left out: {reason[0]}")
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# -- the parts ----------------------------------------------------------------------------------------


def _parts(device: torch.device, directory: Path, quick: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """The parts by name, in order. PCIe is timed only with a GPU."""
    budget, nbytes = (0.05, QUICK) if quick else (0.25, LARGE)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "memory": lambda: _memory(device),
        "matrix products": lambda: _gemms(device, budget),
        "attention": lambda: _attention(device, budget, quick),
        "pointwise kernels": lambda: {"pointwise": _pointwise(device, budget)},
        "memory bandwidth": lambda: {"hbm": timings.copy_rate(nbytes, device, budget)},
    }
    if device.type == "cuda":
        parts["PCIe"] = lambda: dict(zip(("pcie_up", "pcie_down", "pcie_both"), timings.pcie(nbytes // 4), strict=True))
    parts |= {
        "host memory bandwidth": lambda: {"dram": timings.copy_rate(nbytes, torch.device("cpu"), budget)},
        "CPU AdamW": lambda: {"adamw": timings.adamw(nbytes // 16, budget)},
        "disk": lambda: measured_disk(directory, nbytes // 2, local_world_size()),
    }
    if device.type == "cuda":
        parts["PCIe beside CPU AdamW"] = lambda: _beside(device)
    if world_size() > 1:
        parts["collectives"] = lambda: _collectives(device, quick)
    return parts


def _sample_host(
    sample: Callable[[torch.device], dict[str, float]], device: torch.device, samples: list[dict[str, float]]
) -> dict[str, Any]:
    """Add a sample of the host's timings and return all samples combined. The load of a shared host changes over time, so
    it is sampled between the other parts."""
    samples.append(sample(device))
    return host_time.combine(samples)


def _beside(device: torch.device) -> dict[str, Any]:
    """The CPU's update and PCIe copies in both directions at once, timed as the engine times them for `cpu_share`."""
    rule = rule_of(AdamW())
    cores, bus = at_once(device, rule)
    return {"pcie_beside": 2 * 4 * (1 + rule.slots) / bus, "adamw_beside": cores}


def _memory(device: torch.device) -> dict[str, Any]:
    host = min(limit.total for limit in limits()) // local_world_size()
    return {"memory": torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host, "host_memory": host}


def _gemms(device: torch.device, budget: float) -> dict[str, Any]:
    shapes = CUDA_GEMMS if device.type == "cuda" else CPU_GEMMS
    return {"gemms": tuple(MeasuredGemm(*s, timings.gemm(*s, device, _dtype(device), budget)) for s in shapes)}


def _attention(device: torch.device, budget: float, quick: bool) -> dict[str, Any]:
    if device.type == "cuda":
        lengths = (1024, 2048, 4096, 8192, 16384)
        shapes = [(max(1, 8192 // s), 32, s, width) for width in (64, 128) for s in lengths]
    else:
        shapes = [(4, 4, s, width) for width in (32, 64, 128) for s in ((128, 512) if quick else (128, 256, 512))]
    rates = [(s[3], s[2], *timings.attention(s, device, _dtype(device), budget)) for s in shapes]
    return {"attention": tuple(MeasuredAttention(*r) for r in rates)}


def _pointwise(device: torch.device, budget: float) -> float:
    if device.type == "cuda":
        return timings.pointwise(16384, device, _dtype(device), budget)
    return pointwise.rate(4 * budget)


def _collectives(device: torch.device, quick: bool) -> dict[str, Any]:
    top = (28 if device.type == "cuda" else 24) - (2 if quick else 0)
    sizes = [1 << e for e in range(14, top + 1, 2)]
    return {"collectives": tuple(_line(kind, sizes, device, 5 if quick else 15) for kind in KINDS)}


def _line(kind: CollectiveKind, sizes: list[int], device: torch.device, repeats: int) -> MeasuredCollective:
    """The latency and bandwidth of one collective, from its times at several sizes."""
    world = world_size()
    share = {"all_reduce": 2 * (world - 1) / world, "broadcast": 1.0}.get(kind, (world - 1) / world)
    points = [(share * size, timings.collective(kind, size, device, repeats)) for size in sizes]
    latency, slope = fit(points)
    return MeasuredCollective(kind, world, -(-world // local_world_size()), latency, 1 / slope)


def fit(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Fit seconds = latency + slope × bytes by least squares of the relative errors. Both are above zero."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * nbytes for w, (nbytes, _) in zip(weights, points, strict=True)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    up = sum(w * (b - x) * (t - y) for w, (b, t) in zip(weights, points, strict=True))
    slope = up / sum(w * (b - x) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    latency = y - slope * x
    if latency <= 0 or slope <= 0:  # too noisy for a line: take the fastest time and the largest size
        return min(t for _, t in points), points[-1][1] / points[-1][0]
    return latency, slope


# -- combining ranks ----------------------------------------------------------------------------------


def _slowest(found: dict[str, Any]) -> dict[str, Any]:
    """The numbers for all ranks: of every number the slowest rank's, of every table rank 0's."""
    everyone: list[Any] = [found]
    if world_size() > 1:
        everyone = [None] * world_size()
        dist.all_gather_object(everyone, found)
    values: dict[str, Any] = {}
    for name in everyone[0]:
        answers = [f.get(name) for f in everyone]
        if name == "notes":
            values[name] = tuple(dict.fromkeys(note for notes in answers for note in notes))
        elif isinstance(answers[0], tuple):
            values[name] = answers[0]
        elif None not in answers:
            values[name] = max(answers) if name in SECONDS else min(answers)
    return values


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} {platform.machine()} cores, {torch.get_num_threads()} threads a rank"


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _dtype_name(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"
