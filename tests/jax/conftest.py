"""Eight simulated devices, and quick compilation. The flags count only if they are set before JAX starts.

Most of the time goes into XLA's compiler: what it has made is kept for other workers and for the next call. Not for runs in
processes of their own: a step of two CPU devices that is read from the cache can issue its collectives in another order on each
device, and then waits for ever (seen with jaxlib 0.10.2).
"""

import gc
import os
from pathlib import Path

QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",  # one module a program: 32 take more time together
)
CACHE = Path(__file__).parents[2] / "build/jax"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *QUICK])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  after the flags

jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
gc.set_threshold(100_000, 50, 100)  # a trace allocates much that lives on: by default a tenth of its time is looking for garbage
