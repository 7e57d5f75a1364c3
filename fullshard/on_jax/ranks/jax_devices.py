"""The devices of this machine as JAX sees them, and what is known of their kind."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax

from fullshard.base.errors import FullshardError
from fullshard.cluster.hardware import DEVICES, Device
from fullshard.cluster.topology import Cluster
from fullshard.on_jax.private.jax_internals import devices_are_taken

LOOK = "import jax; found = jax.local_devices(); print(len(found), found[0].platform, found[0].device_kind, sep='|')"
FILES = ("/dev/nvidia0", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")  # of accelerators that JAX knows
SIMULATED = 2  # devices on a CPU, unless another number is asked for
GIVEN = "FULLSHARD_DEVICES"  # of the launcher: how many of this process's devices are used


@cache
def _seen() -> tuple[int, str, str]:
    """Count, platform and kind of this machine's devices. Another process looks, since looking takes most of a GPU's memory."""
    if devices_are_taken():  # this process has them already
        found = jax.local_devices()
        return len(found), found[0].platform, found[0].device_kind
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not any(Path(f).exists() for f in FILES):
        return SIMULATED, "cpu", "cpu"
    looked = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)
    if looked.returncode:
        lines = looked.stderr.strip().splitlines()
        raise FullshardError(f"JAX cannot start on this machine: {lines[-1] if lines else 'no output'}")
    count, platform, kind = looked.stdout.strip().splitlines()[-1].split("|")
    return (SIMULATED, "cpu", "cpu") if platform == "cpu" else (int(count), platform, kind)


def local_devices() -> int:
    """The default number of devices of a run: the accelerators of this machine, or 2 simulated ones. From then on, this process
    uses the CPU alone, so that the one that trains finds them free."""
    count, platform, _ = _seen()
    if platform != "cpu" and not devices_are_taken():
        jax.config.update("jax_platforms", "cpu")
    return count


def all_devices() -> int:
    """The devices of all processes; fewer if the launcher says so."""
    given = os.environ.get(GIVEN)
    return int(given) if given else jax.device_count()


def preset_of(kind: str) -> str | None:
    """The preset of a kind of device: the longest known name within it (`NVIDIA H200` is `h200`). None if unknown."""
    if kind.lower() == "cpu":
        return "cpu"
    name = kind.lower().replace(" ", "")
    return max((d for d in DEVICES if d in name and d != "cpu"), key=len, default=None)


def local_cluster(devices: int) -> Cluster:
    """A cluster of `devices` devices of this machine's kind, with nominal numbers. An unknown accelerator counts as an H100."""
    return Cluster.named(f"{devices}x{preset_of(_seen()[2]) or 'h100'}")


def known_device(device: Any) -> Device | None:
    """The published numbers of an accelerator; None for an unknown one, and for a CPU, of which there are none."""
    found = None if device.platform == "cpu" else preset_of(device.device_kind)
    return DEVICES[found] if found else None


def out_of_host_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError)


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def peak_bytes(device: jax.Device) -> dict[str, int]:
    """The allocator's peak since the process began: `allocated` and `reserved`. Empty where the device has no count."""
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        return {}
    reserved = stats.get("peak_pool_bytes") or stats.get("pool_bytes") or stats.get("bytes_limit", 0)
    return {"allocated": stats["peak_bytes_in_use"], "reserved": reserved}
