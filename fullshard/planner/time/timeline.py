"""The seconds of a step: its operations laid onto lanes, each waiting for what it needs.

The host issues everything in the schedule's order. The device computes on one lane while gathers, reductions and all-reduces
run on others; those that cross the same links share them. What compute waited for is exposed.
A CPU is its own host and its collectives block, so there everything happens one after the other.
"""

from typing import Any

from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.plan.optimizer import AdamW, Optimizer
from fullshard.plan.plan import Plan
from fullshard.planner.step.few_blocks import FewBlocks, schedules
from fullshard.planner.step.float8_products import step_sections
from fullshard.planner.step.lowering import LoweredStep
from fullshard.planner.step.offload_bytes import OffloadBytes, offload_bytes, slots_of
from fullshard.planner.step.phases import BACKWARD, refuse_unpredicted
from fullshard.planner.step.schedule import chunks, different_micro_batches, schedule
from fullshard.planner.step.xla_lowering import lowering
from fullshard.planner.time.offload_lanes import balance
from fullshard.planner.time.roofline import Machine
from fullshard.planner.time.steady_time import SteadyTime
from fullshard.planner.time.step_lanes import StepLanes, Timeline

QUIET_HOST = 0.97  # share of its mean pace on a quiet core: above this, the host's cores count as equal
STEPS = 3  # with offload, until one step leaves as much to the next as it found


def timeline(
    plan: Plan,
    description: Description,
    cluster: Cluster,
    *,
    loss: str = "chunked",
    optimizer: Optimizer | None = None,
    spread: float | None = None,
    clip: bool = True,
    cpu_share: float | None = None,
    engine: str = "torch",
) -> Timeline:
    """Seconds of one step of `plan` on `cluster`.

    `spread`: standard deviation of step time over ranks, as a share of a step; by default that of the calibration. `clip`:
    whether updates wait for the gradient norm. `cpu_share`: share of the pieces that the host's cores update; by default
    the one that balances them with PCIe. `engine`: whose schedule it is. Kernels are torch's, those of compiled blocks on JAX.

    On a shared host cores differ from step to step, and a step takes as long as the slower of device and host. So the
    result is the mean of three steps: at the pace of a quiet core, at the mean pace, and as much above it.
    """
    slots = slots_of(optimizer or AdamW())
    share = balance(cluster, plan, slots) if cpu_share is None else cpu_share
    away = offload_bytes(plan, description, slots, clip=clip, cpu_share=share)
    shown = different_micro_batches(plan)
    quiet = cluster.of("quiet")
    hosts = [cluster] if quiet > QUIET_HOST else [cluster.with_host(pace) for pace in (quiet, 1.0, 2 - quiet)]
    common: dict[str, Any] = {"loss": loss, "clip": clip, "engine": engine}
    for few, found in schedules(plan, description, shown, whole=bool(away), **common):  # updates go on into the next step
        lanes = [StepLanes(plan, host, away, engine) for host in hosts]
        lower = lowering(plan, away, engine=engine, gpu=cluster.device.kind != "cpu")
        step = lower.step(found)
        if all(play(at, step, few) for at in lanes):
            break
    late = cluster.calibration.rank_spread if spread is None else spread
    return _mean([at.finish(repeats=plan.batch.accumulate - len(shown), spread=late) for at in lanes])


def lowered_step(
    plan: Plan,
    description: Description,
    cluster: Cluster,
    micros: tuple[int, ...],
    loss: str,
    optimizer: Optimizer | None,
    clip: bool,
    cpu_share: float | None,
    engine: str = "torch",
) -> tuple[OffloadBytes, LoweredStep]:
    """What is laid onto lanes: the units and what of them is offloaded, and the operations of these micro-batches."""
    slots = slots_of(optimizer or AdamW())
    share = balance(cluster, plan, slots) if cpu_share is None else cpu_share
    away = offload_bytes(plan, description, slots, clip=clip, cpu_share=share)
    operations = schedule(plan, description, loss=loss, micros=micros, clip=clip, engine=engine)
    gpu = cluster.device.kind != "cpu"
    return away, lowering(plan, away, engine=engine, gpu=gpu).step(operations)


def play(lanes: StepLanes, step: LoweredStep, few: FewBlocks | None = None) -> bool:
    """Lay the operations onto the lanes: once, or with offload until one step is like the next. Return False if those of few
    blocks do not become steady."""
    watch = SteadyTime(few, lanes) if few else None
    for _ in range(STEPS if lanes.away else 1):
        lanes.begin()
        for operation, effects in step:
            if watch and not watch.at(operation):
                return False
            lanes.run(operation, effects)
    return watch is None or watch.passed


def _mean(steps: list[Timeline]) -> Timeline:
    def mean(table: str) -> dict[str, float]:
        keys = dict.fromkeys(key for step in steps for key in getattr(step, table))
        return {key: sum(getattr(step, table).get(key, 0.0) for step in steps) / len(steps) for key in keys}

    seconds = sum(step.seconds for step in steps) / len(steps)
    return Timeline(seconds, busy=mean("busy"), exposed=mean("exposed"), compute=mean("compute"))


def kernels_seconds(plan: Plan, description: Description, cluster: Cluster, loss: str, engine: str = "torch") -> float:
    """Seconds of a step's own kernels: a lower bound of step time for every strategy."""
    refuse_unpredicted(plan, description)
    batch, found = plan.batch, 0.0
    p = plan.precision
    machine = Machine(cluster, p.compute, mesh=plan.mesh, kernels=plan.kernels, float8=p.float8)
    sections = step_sections(plan, description, loss, engine, cast_weights=False)
    for phase, _, section in sections:
        shapes = [(batch.micro_batch, batch.sequence)]
        if phase == "chunk":
            shapes = [(1, tokens) for tokens in chunks(plan, description, engine)]
        how = {"backward": phase in BACKWARD, "chunk": phase == "chunk"}
        found += sum(machine.section(section, *shape, **how).seconds for shape in shapes)
    return batch.accumulate * found
