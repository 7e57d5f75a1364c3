"""The estimate of a plan on a cluster: peak bytes by tier and kind, seconds by lane, and the bottleneck in words."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from fullshard.base.errors import FullshardError, checked_call
from fullshard.base.text import bytes_text, count_text, seconds_text, table
from fullshard.cluster.topology import Cluster
from fullshard.model.costs import evaluate
from fullshard.model.description import Description
from fullshard.plan.choices import idle_loss_kernel
from fullshard.plan.engine_traits import TRAITS
from fullshard.plan.optimizer import AdamW, Optimizer
from fullshard.plan.plan import Plan
from fullshard.planner.device_limits import refuse_on_devices
from fullshard.planner.memory.peak_memory import PeakMemory, predict
from fullshard.planner.step.offload_bytes import slots_of
from fullshard.planner.time.offload_lanes import balance
from fullshard.planner.time.step_lanes import Timeline
from fullshard.planner.time.timeline import timeline

CONTEXT = 1 << 30  # bytes of a device for CUDA's context and NCCL's buffers, which are not the allocator's
MARGIN = 0.03  # of a device's memory, kept free for what is not predicted
HOST_MARGIN = 0.1  # of the host's memory, for other processes
DISK_MARGIN = 0.05  # of the disk, for the file system and what others write


@dataclass(frozen=True)
class Tier:
    """Bytes of one rank on device, host or disk. `reserved_bytes`: what the allocator takes for them. `terms`: by kind."""

    allocated_bytes: int = 0
    reserved_bytes: int | None = None
    terms: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """Memory of one rank and time of one step.

    `peak_phase`: when the device's memory peaks. `lanes`: busy seconds by lane. `exposed`: seconds that compute waited, by cause.
    `compute`: seconds by kind of kernel.
    """

    device: Tier
    host: Tier
    disk: Tier
    peak_phase: str
    available: int  # bytes of the device that a plan may reserve
    host_available: int  # bytes of a device's share of the host
    disk_available: int  # bytes of a device's share of the disk
    cpu_share: float | None  # share of the update's pieces that the host's cores do; None if all state is on the device
    step_seconds: float
    lanes: dict[str, float]
    exposed: dict[str, float]
    compute: dict[str, float]
    tokens_per_second: float
    mfu: float
    price: float | None  # of a million tokens
    bottleneck: str
    calibration: str  # name of the fitted numbers that were used
    calibrated_for_device: bool  # False if those of another kind of device were used
    counted: str = "tokens"  # what `tokens_per_second` and `price` count: tokens, or rows of another kind
    notes: tuple[str, ...] = ()  # what the estimate does not contain, or was not fitted to

    @property
    def needed(self) -> int:
        """Bytes that the device must have free: reserved ones, or allocated ones if nothing reserves."""
        found = self.device.reserved_bytes
        return self.device.allocated_bytes if found is None else found

    @property
    def fits(self) -> bool:
        return (
            self.needed <= self.available
            and self.host.allocated_bytes <= self.host_available
            and self.disk.allocated_bytes <= self.disk_available
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"fits": self.fits}

    def __str__(self) -> str:
        return "\n\n".join(part for part in (_memory_table(self), _time_table(self), _summary(self)) if part)


def refuse_uncosted(description: Description) -> None:
    """Raise for a description without costs."""
    if description.costs is None:
        raise FullshardError(
            "this description has no costs, which a plan is chosen by; "
            "write on_torch.describe(model, micro_batch=1, sequence=4096)"
        )


@checked_call("estimate(plan, description, cluster)", plan=Plan, description=Description, cluster=Cluster)
def estimate(
    plan: Plan,
    description: Description,
    cluster: Cluster,
    *,
    loss: str = "chunked",
    optimizer: Optimizer | None = None,
    limit: int | None = None,
    reserved: bool = True,
    clip: bool = True,
    peak: PeakMemory | None = None,
    time: Timeline | None = None,
    engine: str = "torch",
) -> Estimate:
    """What `plan` costs on `cluster`.

    `limit`: bytes of a device to use, in place of all it has. `reserved`: whether to predict the allocator's bytes. `clip`:
    whether gradients are clipped, so that updates wait for the norm. `peak` and `time`: what is known of the plan. `engine`:
    which carries it out; the kernels are torch's.
    """
    refuse_uncosted(description)
    refuse_other_cluster(plan, cluster)
    refuse_on_devices(plan, cluster)
    refuse_idle_loss_kernel(plan, loss)
    share = cores_share(plan, cluster, optimizer)
    on_cuda = cluster.device.kind == "cuda"
    common: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "clip": clip, "cpu_share": share}
    common["engine"] = engine
    peak = peak or predict(plan, description, **common, reserved=reserved and on_cuda, cublas=on_cuda)
    time = time or timeline(plan, description, cluster, **common)
    tokens = plan.mesh.data * plan.batch.accumulate * plan.batch.micro_batch * plan.batch.sequence
    rate = tokens / time.seconds
    price, example = cluster.device.price, description.costs.example if description.costs else None
    return Estimate(
        device=Tier(peak.allocated, peak.reserved, peak.terms),
        host=Tier(sum(peak.host.values()), None, peak.host),
        disk=Tier(sum(peak.disk.values()), None, peak.disk),
        peak_phase=peak.phase,
        available=available(cluster, limit),
        host_available=host_available(cluster, peak.allocated),
        disk_available=disk_available(cluster),
        cpu_share=share if plan.offloads_state else None,
        step_seconds=time.seconds,
        lanes=time.busy,
        exposed=time.exposed,
        compute=time.compute,
        tokens_per_second=rate,
        mfu=mfu(plan, description, cluster, loss, time.seconds),
        price=None if price is None else price * cluster.devices / 3600 / rate * 1e6,
        bottleneck=bottleneck(time),
        calibration=cluster.calibration.name,
        calibrated_for_device=cluster.calibration.covers(cluster.device),
        counted="rows" if plan.batch.dims else "tokens",
        notes=(*(example.notes if example else ()), *filter(None, [_other_torch(cluster, engine)])),
    )


def _other_torch(cluster: Cluster, engine: str) -> str:
    """A plan for devices that are not here may run with another torch than is installed here; so this is no refusal."""
    return cluster.calibration.other_torch() if TRAITS[engine].predicted else ""


def refuse_idle_loss_kernel(plan: Plan, loss: str) -> None:
    if why := idle_loss_kernel("kernels.loss", plan.kernels.loss, loss):
        raise FullshardError(why)


def refuse_other_cluster(plan: Plan, cluster: Cluster) -> None:
    if plan.mesh.devices != cluster.devices:
        raise FullshardError(
            f"the plan is for {plan.mesh.devices} devices, {cluster.name} has {cluster.devices}; "
            f"write {plan.mesh.devices}x{cluster.device.name}, or plan again"
        )


def available(cluster: Cluster, limit: int | None = None) -> int:
    """Bytes of a device that a plan may reserve: all but context and margin."""
    if limit is not None:
        return limit
    memory = int(cluster.of("memory"))
    return int(memory * (1 - MARGIN)) - (CONTEXT if cluster.device.kind == "cuda" else 0)


def host_available(cluster: Cluster, allocated: int) -> int:
    """Bytes of host memory that a rank may use for offload. On a CPU, what is allocated comes out of the same memory."""
    memory = int(cluster.of("host_memory") * (1 - HOST_MARGIN))
    return max(0, memory - allocated) if cluster.device.kind == "cpu" else memory


def disk_available(cluster: Cluster) -> int:
    """Bytes of disk that a rank may use."""
    return int(cluster.of("disk") * (1 - DISK_MARGIN))


def cores_share(plan: Plan, cluster: Cluster, optimizer: Optimizer | None = None) -> float:
    """The share of update pieces that the host's cores do: the plan's, or the one that balances them with PCIe."""
    if plan.cpu_share is not None:
        return plan.cpu_share
    return balance(cluster, plan, slots_of(optimizer or AdamW()))


def mfu(plan: Plan, description: Description, cluster: Cluster, loss: str, seconds: float) -> float:
    """Model flops a second over the devices' peak in their fastest dtype of training, whatever the plan computes in.
    Recomputation does not count; attention counts in full, not half."""
    assert description.costs is not None
    costs = description.costs.on(plan.mesh)
    trace = costs.trace(plan.precision.compute, loss, "none")
    shape = (plan.batch.micro_batch, plan.batch.sequence)
    flops = 0
    for phase, _, section in trace:
        at = (1, shape[0] * shape[1]) if phase == "chunk" else shape
        flops += sum(evaluate(op.flops, *at) for op in section.ops if op.kind != "pointwise")
    return plan.batch.accumulate * flops / seconds / cluster.device.peak.training


# -- in words ------------------------------------------------------------------------------------------------


# For people: the keys of `Timeline.exposed`, of `Timeline.compute`, and of the lanes of offload in `Timeline.busy`.
WAIT_WORDS = {
    "gather": "waiting for parameters to be gathered",
    "reduce": "waiting for gradients to be reduced",
    "copies": "waiting for the all-reduce between copies",
    "host": "waiting for the host to launch kernels",
    "tensor": "waiting for the collectives of the tensor axis",
    "experts": "waiting for tokens to reach their experts and return",
    "others": "waiting for the slowest rank",
    "crowding": "sharing the device with the kernels of collectives",
    "update": "waiting for updates of offloaded state",
    "fetch": "waiting for offloaded bytes to reach the device",
    "spill": "waiting for activations to leave the device",
}
COMPUTE_WORDS = {
    "gemm": "matrix products",
    "attention": "attention",
    "pointwise": "pointwise kernels, bound by memory bandwidth",
    "copies": "copies into and out of collectives' buffers",
    "update": "the optimizer's update",
    "norm": "the gradient norm",
    "agree": "small all-reduces",
}


LANE_WORDS = {
    "pcie_up": "the optimizer's state over PCIe",
    "pcie_down": "the optimizer's state over PCIe",
    "cpu": "the optimizer's update by the host's cores",
    "disk": "reads and writes of the disk",
}


def bottleneck(time: Timeline) -> str:
    """What takes the most of a step. For updates that the step waits for, the lane that is busiest."""
    parts = {WAIT_WORDS[k]: s for k, s in time.exposed.items()} | {COMPUTE_WORDS[k]: s for k, s in time.compute.items()}
    if waited := parts.pop(WAIT_WORDS["update"], 0.0):
        lane = max(LANE_WORDS, key=lambda name: time.busy.get(name, 0.0))
        parts[f"waiting for {LANE_WORDS[lane]}"] = waited
    words, seconds = max(parts.items(), key=lambda item: item[1])
    return f"{words}: {seconds_text(seconds)} of {seconds_text(time.seconds)} ({seconds / time.seconds:.0%})"


def _memory_table(e: Estimate) -> str:
    rows = [[term, bytes_text(n)] for term, n in sorted(e.device.terms.items(), key=lambda item: -item[1])]
    rows.append(["allocated at once", bytes_text(e.device.allocated_bytes)])
    if e.device.reserved_bytes is not None:
        rows.append(["reserved by the allocator", bytes_text(e.device.reserved_bytes)])
    rows.append(["may be used", bytes_text(e.available)])
    text = table(["a device's memory at its peak", ""], rows, right=(1,))
    for name, tier, room in (("host", e.host, e.host_available), ("disk", e.disk, e.disk_available)):
        if tier.allocated_bytes:
            terms = ", ".join(f"{term} {bytes_text(n)}" for term, n in sorted(tier.terms.items(), key=lambda item: -item[1]))
            text += f"\n{name}: {bytes_text(tier.allocated_bytes)} of {bytes_text(room)} a rank ({terms})"
    return f"{text}\npeak in the {e.peak_phase}"


def _time_table(e: Estimate) -> str:
    rows = [[COMPUTE_WORDS[k], seconds_text(s), f"{s / e.step_seconds:.1%}"] for k, s in _largest(e.compute)]
    rows += [[WAIT_WORDS[k], seconds_text(s), f"{s / e.step_seconds:.1%}"] for k, s in _largest(e.exposed)]
    rows.append(["a step", seconds_text(e.step_seconds), "100.0%"])
    return table(["time of a step", "", ""], rows, right=(1, 2))


def _largest(parts: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(((k, s) for k, s in parts.items() if s > 0), key=lambda item: -item[1])


def _summary(e: Estimate) -> str:
    words = [f"{count_text(e.tokens_per_second)} {e.counted}/s", f"MFU {e.mfu:.1%}"]
    if e.price is not None:
        words.append(f"{e.price:.2f} a million {e.counted}")
    other = "" if e.calibrated_for_device else "; this device has no calibration of its own, so step times can be further off"
    notes = "".join(f"\nnote: {note}" for note in e.notes)
    return f"{', '.join(words)}; bottleneck: {e.bottleneck}{notes}\ncalibration: {e.calibration}{other}"
