"""Eight simulated devices, and quick compilation. The flags count only if they are set before JAX starts.

Most of the time goes into XLA's compiler: what it has made is kept for other workers, for runs in processes of their own and for
the next call.
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
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
gc.set_threshold(100_000, 50, 100)  # a trace allocates much that lives on: by default a tenth of its time is looking for garbage
