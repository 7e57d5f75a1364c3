"""What is on the device when a step begins: what rests there, the step's batch, and what the step before left over."""

from collections.abc import Iterator
from functools import lru_cache

from fullshard.model.costs import TOKENS, evaluate
from fullshard.model.description import FLOATS, Description
from fullshard.plan.plan import Plan, Precision
from fullshard.planner.step.effects import REDUCE, Allocate, AllocateOnce, AllocateRow, Event, Free, Row
from fullshard.planner.step.offload_bytes import OffloadBytes, WaitingGradients
from fullshard.planner.step.unit_sizes import item, scaled


def rest(plan: Plan, description: Description, away: OffloadBytes) -> Iterator[Event]:
    """What stays between steps: parameters, buffers, staging slots, residuals, and state apart from parameters."""
    precision = plan.precision
    for unit in plan.units:
        sizes = away.groups[unit.name]
        if unit.home.params == "device":
            shards = scaled(sizes.shards, item(precision.compute if sizes.away else precision.master))
            yield AllocateRow("rest", f"params:{unit.name}.", shards, "params")
        if sizes.away and unit.home.optimizer == "device":  # master and moments, apart from the shard's memory
            yield Allocate("rest", f"state:{unit.name}", away.state_of(sizes), "optimizer")
        if sizes.world > 1 and plan.wire.error_feedback:
            residual = sizes.world * plan.wire.message_bytes(*(sizes.shards[i] for i in sizes.trained))
            yield Allocate("rest", f"residual:{unit.name}", residual, "residuals", REDUCE)
    yield Allocate("rest", "scales", 4 * sum(len(sizes.float8) for sizes in away.groups.values()), "params")
    for slot, nbytes in enumerate(away.staging()):
        yield Allocate("rest", f"staging{slot}", nbytes, "staging")
    for b in [*description.buffers, *[b for u in description.units for b in u.buffers]]:
        kind = precision.buffers if b.dtype in FLOATS else None
        yield Allocate("rest", f"buffer:{b.name}", b.nbytes if kind is None else b.numel * item(kind), "buffers")


def states(plan: Plan, away: OffloadBytes) -> Iterator[Event]:
    """Optimizer state of units that are not offloaded, which the first update makes."""
    for sizes in away.groups.values():
        if not sizes.away:
            row = _state_row(sizes.trained_shards, plan.precision, away.slots)
            yield AllocateOnce("rest", f"state:{sizes.name}.", row, "optimizer")


@lru_cache(maxsize=4096)
def _state_row(shards: tuple[int, ...], precision: Precision, slots: int) -> Row:
    """Bytes of each tensor of optimizer state: Adam has a step count on the device for each parameter."""
    return tuple(nbytes for n in shards for nbytes in [4] * (slots == 2) + [precision.moment_bytes(n)] * slots)


def left_over(away: OffloadBytes) -> Iterator[Event]:
    """Gradients of the previous step whose updates are still under way; the first units' came last."""
    waiting = WaitingGradients(away)
    for sizes in reversed(away.groups.values()):
        if sizes.away and sizes.name in away.staying:
            yield Allocate(sizes.name, "gradient", sizes.moving * away.gradient, "gradients", REDUCE)
            yield from (Free(gone, "gradient") for gone in waiting.add(sizes.name))


def batch(plan: Plan, description: Description) -> Iterator[Allocate]:
    """The tensors of all micro-batches; by default token ids and labels, int64."""
    inputs = description.costs.inputs if description.costs else TOKENS
    for micro in range(plan.batch.accumulate):
        for name, size in inputs.items():
            yield Allocate("batch", f"{name}{micro}", evaluate(size, plan.batch.micro_batch, plan.batch.sequence), "batch")
