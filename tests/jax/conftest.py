"""Eight simulated devices, and quick compilation. The flags count only if they are set before JAX starts."""

import os

QUICK = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *QUICK])
os.environ.setdefault("JAX_PLATFORMS", "cpu")
