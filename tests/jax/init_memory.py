"""One of two processes that shard a model over eight devices, four each: prints how much its memory grew meanwhile.

python -m tests.jax.init_memory PORT RANK
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

import fullshard as fs
from fullshard import on_jax
from fullshard.model.presets import LlamaSize
from fullshard.on_jax.models import NnxLlama


def memory(line: str) -> int:
    """Bytes of this process as the kernel counts them: `VmRSS` now, `VmHWM` at most."""
    with open("/proc/self/status") as file:
        return next(int(found.split()[1]) * 1024 for found in file if found.startswith(line))


def grown(size: LlamaSize) -> dict[str, int]:
    make = lambda rngs: NnxLlama(size, rngs=rngs)
    described = on_jax.describe(make)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest so far is now's
    before = memory("VmRSS")
    state = on_jax.shard(make, fs.zero3(described, devices=8))
    jax.block_until_ready(state.params)
    return {"model": described.nbytes, "device": state.held_bytes()["params"], "most": memory("VmHWM") - before}


if __name__ == "__main__":
    port, rank = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(rank))
    grown(LlamaSize(64, 1, 4, 4, 64, 64))  # what a first compilation takes
    print(json.dumps(grown(LlamaSize(1024, 6, 8, 8, 4096, 32768))), flush=True)
