"""This machine as torch sees it, as `fullshard.engine.machine.LocalMachine`."""

import torch

from fullshard.on_torch.measuring import host_time
from fullshard.on_torch.measuring.flops import flops_per_token, peak_flops
from fullshard.on_torch.measuring.measure import measure
from fullshard.on_torch.measuring.torch_profiler import TorchProfiler as profiler  # noqa: N813 - a call starts one
from fullshard.on_torch.parallelize.state import State, memory
from fullshard.on_torch.ranks.device_meshes import local_devices
from fullshard.on_torch.ranks.device_presets import local_cluster

__all__ = [
    "flops_per_token",
    "host_share",
    "local_cluster",
    "local_devices",
    "measure",
    "memory",
    "out_of_host_memory",
    "out_of_memory",
    "peak_flops",
    "profiler",
]


def host_share(state: State, issued: float, quiet: float, looks: int) -> float:
    return host_time.host_share(issued, quiet, state.device, looks=looks)


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or out_of_host_memory(error)


def out_of_host_memory(error: BaseException) -> bool:
    """The CPU's allocator has no exception of its own."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error))
