"""This machine as JAX sees it, as `fullshard.engine.machine.LocalMachine`."""

from fullshard.on_jax.measuring.flops import flops_per_token, peak_flops
from fullshard.on_jax.measuring.jax_profiler import JaxProfiler as profiler  # noqa: N813 - a call starts one
from fullshard.on_jax.measuring.measure import measure
from fullshard.on_jax.measuring.memory_analysis import memory
from fullshard.on_jax.ranks.jax_devices import local_cluster, local_devices, out_of_host_memory, out_of_memory

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

host_share = None
