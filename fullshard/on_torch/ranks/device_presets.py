"""The cluster of this machine: nominal numbers by the name of its device, and measured numbers."""

import ctypes
from dataclasses import replace

import torch

from fullshard.cluster.hardware import DEVICES, Device, Node, PeakFlops
from fullshard.cluster.topology import Cluster, Measured
from fullshard.on_torch.ranks.device_meshes import local_world_size, world_size

EMULATED = 0.5  # of the rate in fp32: bf16 products of GPUs that have none, through casts


def device_preset(device: torch.device) -> str | None:
    """The preset of a device: the longest known name within the driver's (`NVIDIA H200` is `h200`). None if unknown."""
    if device.type == "cpu":
        return "cpu"
    name = (_name_without_driver() or torch.cuda.get_device_name(device)).lower().replace(" ", "")
    return max((d for d in DEVICES if d in name and DEVICES[d].kind == "cuda"), key=len, default=None)


def _name_without_driver() -> str | None:
    """The name of this machine's NVIDIA GPUs, if all have the same, from the library that watches them. Asking the driver starts
    it, and a copy of the process cannot use one that was started before."""
    if torch.cuda.is_initialized():
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count, names = ctypes.c_uint(), set()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    for index in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) or nvml.nvmlDeviceGetName(handle, name, 96):
            return None
        names.add(name.value.decode())
    return names.pop() if len(names) == 1 else None


def known_device(device: torch.device) -> Device | None:
    """The published numbers of a GPU; None for an unknown one, and for a CPU, of which there are none."""
    known = device_preset(device) if device.type == "cuda" else None
    return DEVICES[known] if known else None


def local_cluster(devices: int) -> Cluster:
    """A cluster of `devices` devices of this machine's kind, with nominal numbers. An unknown GPU counts as an H100 with the
    memory that it has, and without fast bf16 if it only emulates that."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if known := device_preset(device):
        return Cluster.named(f"{devices}x{known}")
    like = Cluster.named(f"{devices}xh100")
    found = replace(like.device, memory=torch.cuda.get_device_properties(device).total_memory)
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        found = replace(found, peak=PeakFlops(bf16=EMULATED * (found.peak.fp32 or found.peak.bf16), fp32=found.peak.fp32))
    return replace(like, device=found)


def measured_cluster(device: torch.device, measured: Measured) -> Cluster:
    """The cluster of the running ranks, with nominal and measured numbers."""
    preset = device_preset(device)
    if preset is None:
        note = (
            f"no datasheet of {measured.machine} is known here: its nominal numbers are the measured ones, "
            "its links those of an l40s"
        )
        return _unknown_device(replace(measured, notes=(*measured.notes, note)))
    nominal = Cluster.named(f"{world_size()}x{preset}")
    return replace(nominal, node=_node(nominal.node), measured=measured)


def _node(nominal: Node) -> Node:
    """The preset's node, with the number of local ranks if that contradicts the preset."""
    local = local_world_size()
    return replace(nominal, devices=local) if world_size() > local or local > nominal.devices else nominal


def _unknown_device(measured: Measured) -> Cluster:
    """A cluster of a device without a preset: the measured numbers are also its nominal ones."""
    like = Cluster.named(f"{world_size()}xl40s")
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
