"""What of a plan a kind of device cannot carry out, or carries out slowly. Knows no engine."""

from fullshard.base.errors import FullshardError
from fullshard.cluster.hardware import Device
from fullshard.cluster.topology import Cluster
from fullshard.plan.choices import Kernels, Precision
from fullshard.plan.plan import Plan


def refuse_on_devices(plan: Plan, cluster: Cluster) -> None:
    """Raise for products, kernels or memory of collectives that the cluster's devices do not have."""
    refuse_float8_device(plan.precision, cluster)
    if cluster.device.kind != "cpu":
        return
    refuse_on_cpu(plan.kernels)
    if plan.wire.memory != "torch":
        raise FullshardError(f"wire.memory = {plan.wire.memory!r} is for NCCL, and these devices are CPUs; leave it out")


def slow_precision(precision: Precision, device: Device | None) -> str | None:
    """What a compute dtype leaves on the table, in a sentence; None if the device computes in none faster, by its maker."""
    if device is None or precision.compute != "fp32" or device.peak.fastest == "fp32" or device.peak.fp32 is None:
        return None
    faster = device.peak.training / device.peak.fp32
    text = f"{faster:.0f}" if faster >= 10 else f"{faster:.1f}"
    return f"the plan computes in fp32; {device.peak.fastest} would be up to {text}× faster here (precision=Precision('bf16'))"


def refuse_float8_device(precision: Precision, cluster: Cluster) -> None:
    """Raise for float8 on a device without such products. A CPU emulates them."""
    if precision.float8 is not None and cluster.device.kind != "cpu" and cluster.device.peak.fp8 is None:
        raise FullshardError(
            f"precision.float8 = {precision.float8!r}: {cluster.device.name} has no rate for matrix products in float8; "
            "leave it out, or write peak.fp8 in a cluster file"
        )


def refuse_on_cpu(kernels: Kernels) -> None:
    """Raise for a kernel that CPUs do not have."""
    for part in ("loss", "update"):
        if getattr(kernels, part) == "fused":
            raise FullshardError(f"kernels.{part} = 'fused' is a kernel for GPUs, and this device is a CPU; leave it out")
    if kernels.attention not in ("auto", "flash"):
        raise FullshardError(
            f"kernels.attention = {kernels.attention!r} is a backend for GPUs, and this device is a CPU; write 'flash', or leave "
            "it out"
        )
