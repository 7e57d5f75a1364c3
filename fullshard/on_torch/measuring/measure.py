"""`measure`: times this machine and returns it as a cluster, with the nominal numbers of its device beside.

Every part stands alone: one that cannot run is left out, and a note says why. Under torchrun all ranks time
the same part at the same moment, so that what they share counts as their shares; each number is then that of
the slowest rank, because a step waits for it.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.cluster.cluster import PACES, Cluster, Measured
from fullshard.cluster.hardware import DEVICES, Node
from fullshard.cluster.measured import Attention, Collective, CollectiveKind, Gemm
from fullshard.errors import FullshardError
from fullshard.on_torch.agree import acquire_group, gather_results, release_group
from fullshard.on_torch.measuring import host_pace, pointwise, timings
from fullshard.on_torch.offload.kernels.adam import rule_of
from fullshard.on_torch.offload.updates.cpu_share import at_once
from fullshard.on_torch.ranks import start
from fullshard.optimizer import AdamW
from fullshard.storage.disk_speed import Rates, disk_rates, no_disk
from fullshard.storage.memory_limits import limits

Progress = Callable[[str], None]
KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
# Bytes that a copy or an update works on: far beyond a server's caches, unless it has to be quick.
LARGE, QUICK = 1 << 30, 1 << 26
# Of these the slowest rank's number is the largest; the others are rates and sizes.
SECONDS = (*PACES, "adamw", "adamw_beside")

# Rows are tokens, columns a layer's widths: thin ones for decoding and small batches, large ones for training.
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
    """This machine as a cluster: its device's nominal numbers and, beside them, what was timed here.

    `directory` is where the disk is timed; by default where temporary files go. `progress` hears the name of
    each part before it runs. Collective under torchrun: every rank calls it and gets the same cluster.
    """
    where = directory or Path(tempfile.gettempdir())
    if not where.is_dir():
        raise FullshardError(f"{where} is not a directory; write the directory whose disk is to be timed")
    device = _device()
    found: dict[str, Any] = {"notes": []}
    beside: list[dict[str, float]] = []
    for i, (name, part) in enumerate(_parts(device, where, quick).items()):
        progress(name)
        _attempt(name, part, found)
        look = host_pace.paces if i % 3 == 0 else host_pace.glance
        _attempt("the host's pace", partial(_pace, look, device, beside), found)
    values = _slowest(found)
    return cluster_of(device, Measured(machine=_machine(device), dtype=_dtype_name(device), **values))


def _device() -> torch.device:
    if "RANK" in os.environ or dist.is_initialized():
        return start()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _attempt(name: str, part: Callable[[], dict[str, Any]], found: dict[str, Any]) -> None:
    """Run one part on all ranks at once; what it finds is kept, why it failed is noted."""
    if _world() > 1:
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
    """What is timed, in order. A CPU has no PCIe between itself and its memory."""
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
        "disk": lambda: _disk(directory, nbytes // 2),
    }
    if device.type == "cuda":
        parts["PCIe beside CPU AdamW"] = lambda: _beside(device)
    if _world() > 1:
        parts["collectives"] = lambda: _collectives(device, quick)
    return parts


def _pace(
    look: Callable[[torch.device], dict[str, float]], device: torch.device, so_far: list[dict[str, float]]
) -> dict[str, Any]:
    """What the looks between the other parts tell together: a shared host is quiet at one time and not at another."""
    so_far.append(look(device))
    return host_pace.together(so_far)


def _beside(device: torch.device) -> dict[str, Any]:
    """As the engine times them for its share: the cores' update and state both ways over the bus, on the host's memory."""
    rule = rule_of(AdamW())
    cores, bus = at_once(device, rule)
    return {"pcie_beside": 2 * 4 * (1 + rule.slots) / bus, "adamw_beside": cores}


def _memory(device: torch.device) -> dict[str, Any]:
    host = min(limit.total for limit in limits()) // _local_world()
    return {"memory": torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host, "host_memory": host}


def _gemms(device: torch.device, budget: float) -> dict[str, Any]:
    shapes = CUDA_GEMMS if device.type == "cuda" else CPU_GEMMS
    return {"gemms": tuple(Gemm(*s, timings.gemm(*s, device, _dtype(device), budget)) for s in shapes)}


def _attention(device: torch.device, budget: float, quick: bool) -> dict[str, Any]:
    if device.type == "cuda":
        lengths = (1024, 2048, 4096, 8192, 16384)
        shapes = [(max(1, 8192 // s), 32, s, width) for width in (64, 128) for s in lengths]
    else:
        shapes = [(4, 4, s, width) for width in (32, 64, 128) for s in ((128, 512) if quick else (128, 256, 512))]
    rates = [(s[3], s[2], *timings.attention(s, device, _dtype(device), budget)) for s in shapes]
    return {"attention": tuple(Attention(*r) for r in rates)}


def _pointwise(device: torch.device, budget: float) -> float:
    if device.type == "cuda":
        return timings.pointwise(16384, device, _dtype(device), budget)
    return pointwise.rate(4 * budget)


def _disk(directory: Path, nbytes: int) -> dict[str, Any]:
    rates, note = disk_rates(directory, nbytes), no_disk(directory)
    free = shutil.disk_usage(directory).free // _local_world()
    found = {"disk_read": rates.read, "disk_write": rates.write, "disk_both": rates.both, "disk": free or None}
    return {name: rate for name, rate in found.items() if rate is not None} | {"notes": [note] if note else []}


def disk_rates_together(directory: str | Path, nbytes: int, seconds: float) -> Rates:
    """What the slowest rank reaches while all of them try. Collective."""
    group = acquire_group()
    try:
        found = gather_results(group, lambda: disk_rates(directory, nbytes, seconds))
    finally:
        release_group(group)
    at_once = [r.both for r in found if r.both is not None]
    both = min(at_once) if len(at_once) == len(found) else None
    return Rates(min(r.read for r in found), min(r.write for r in found), both)


def _collectives(device: torch.device, quick: bool) -> dict[str, Any]:
    top = (28 if device.type == "cuda" else 24) - (2 if quick else 0)
    sizes = [1 << e for e in range(14, top + 1, 2)]
    return {"collectives": tuple(_line(kind, sizes, device, 5 if quick else 15) for kind in KINDS)}


def _line(kind: CollectiveKind, sizes: list[int], device: torch.device, repeats: int) -> Collective:
    """Latency and bandwidth of one kind, from its times at several sizes."""
    world = _world()
    share = {"all_reduce": 2 * (world - 1) / world, "broadcast": 1.0}.get(kind, (world - 1) / world)
    points = [(share * size, timings.collective(kind, size, device, repeats)) for size in sizes]
    latency, slope = fit(points)
    return Collective(kind, world, -(-world // _local_world()), latency, 1 / slope)


def fit(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Seconds = latency + slope × bytes, by least squares of the relative errors; both stay above zero."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * nbytes for w, (nbytes, _) in zip(weights, points, strict=True)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    up = sum(w * (b - x) * (t - y) for w, (b, t) in zip(weights, points, strict=True))
    slope = up / sum(w * (b - x) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    latency = y - slope * x
    if latency <= 0 or slope <= 0:  # too noisy for a line: the smallest and the largest say what there is to say
        return min(t for _, t in points), points[-1][1] / points[-1][0]
    return latency, slope


# -- putting it together ------------------------------------------------------------------------------


def _slowest(found: dict[str, Any]) -> dict[str, Any]:
    """What all ranks agree on: of every number the slowest rank's, of every table the first rank's."""
    everyone: list[Any] = [found]
    if _world() > 1:
        everyone = [None] * _world()
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


def cluster_of(device: torch.device, measured: Measured) -> Cluster:
    """The measured numbers beside the nominal ones of the device they were timed on."""
    known = known_device(device)
    if known is None:
        measured = replace(measured, notes=(*measured.notes, _unknown(measured.machine)))
        return _unlisted(measured)
    preset = Cluster.named(f"{_world()}x{known}")
    return replace(preset, node=_node(preset.node), measured=measured)


def _node(nominal: Node) -> Node:
    """The preset's node, unless the ranks that run say otherwise."""
    local = _local_world()
    return replace(nominal, devices=local) if _world() > local or local > nominal.devices else nominal


def known_device(device: torch.device) -> str | None:
    """The preset of this device: the longest known name within the driver's."""
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower().replace(" ", "")
    return max((d for d in DEVICES if d in name and DEVICES[d].kind == "cuda"), key=len, default=None)


def _unknown(machine: str) -> str:
    return f"no datasheet of {machine} is known here: its nominal numbers are the measured ones, its links those of an l40s"


def _unlisted(measured: Measured) -> Cluster:
    """A device without a preset: its own measured numbers stand in for the datasheet's."""
    like = Cluster.named(f"{_world()}xl40s")
    best = max((g.rate for g in measured.gemms), default=like.device.peak.bf16)
    name = "".join(c for c in measured.machine.lower() if c.isalnum())
    device = replace(
        like.device,
        name=name,
        memory=measured.memory or like.device.memory,
        peak=replace(like.device.peak, bf16=best, fp32=None, tf32=None, fp8=None),
        hbm=measured.hbm or like.device.hbm,
        efficiency=1.0,
        hbm_efficiency=1.0,
    )
    return replace(like, device=device, node=_node(like.node), measured=measured)


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} {platform.machine()} cores, {torch.get_num_threads()} threads a rank"


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _dtype_name(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _local_world() -> int:
    """Ranks on this machine; without torchrun to say so, all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", _world()))


def local_cluster(devices: int) -> Cluster:
    """So many of this machine's device, by their nominal numbers; of a GPU that is not known, an H100's."""
    kind = device_name(torch.cuda.get_device_name()) or "h100" if torch.cuda.is_available() else "cpu"
    return Cluster.named(f"{devices}x{kind}")


def device_name(words: str) -> str | None:
    """The known device that a driver's name tells of: `NVIDIA H200` is h200."""
    joined = words.lower().replace(" ", "")
    return max((name for name in DEVICES if name in joined), key=len, default=None)
