"""The peak of a step: what is allocated, when, and of what; what the allocator reserves for it."""

from dataclasses import dataclass
from itertools import accumulate

from fullshard.description import ITEM_BYTES, Description
from fullshard.optimizer import SGD, AdamW, Optimizer
from fullshard.plan import Plan
from fullshard.planner.allocator import GRAIN, replay
from fullshard.planner.groups import groups
from fullshard.planner.replay import Replay, Tape
from fullshard.planner.schedule import Operation, schedule


@dataclass(frozen=True)
class Peak:
    """The most that is allocated at once in a steady step, in bytes. `moment`: when; `terms`: of what.

    `reserved`: what the allocator has taken from the device by then, if it was asked for. `at_rest`: what
    stays between steps, by tier and kind.
    """

    allocated: int
    reserved: int | None
    moment: str
    terms: dict[str, int]
    at_rest: dict[str, dict[str, int]]


def predict(
    plan: Plan, description: Description, *, loss: str = "chunked", optimizer: Optimizer | None = None, reserved: bool = True
) -> Peak:
    """What a steady step of `plan` takes on a rank's device.

    Without `reserved`, the allocator is left out: ten times as fast, and `allocated` then lacks the ends of
    blocks that were not worth splitting, a few MiB.
    """
    slots = _slots(optimizer or AdamW())
    operations = schedule(plan, description, loss=loss, micros=_different(plan))
    tape = steady(plan, description, operations, slots)
    allocated, where = _highest(tape)
    taken = None
    if reserved:
        allocated, taken = _with_allocator(plan, description, operations, slots)
    return Peak(
        allocated, taken, _moment(operations, tape.operations[where]), _terms(tape, where), at_rest(plan, description, slots)
    )


def _slots(optimizer: Optimizer) -> int:
    """Tensors of state for each parameter."""
    if isinstance(optimizer, SGD):
        return 1 if optimizer.momentum else 0
    return 2


def _different(plan: Plan) -> tuple[int, ...]:
    """Micro-batches that can have a peak of their own: the first, the second and the last."""
    last = plan.batch.accumulate - 1
    return tuple(sorted({0, min(1, last), last}))


def steady(plan: Plan, description: Description, operations: tuple[Operation, ...], slots: int) -> Tape:
    """The tape of a step that is not the first."""
    player = Replay(plan, description, slots)
    player.rest(description)
    player.states()
    player.workspaces()
    player.play(operations)
    return player.tape


def _with_allocator(plan: Plan, description: Description, operations: tuple[Operation, ...], slots: int) -> tuple[int, int]:
    """Peaks of (allocated, reserved) over three steps: the allocator remembers how it began."""
    player = Replay(plan, description, slots)
    player.rest(description)
    starts = [0]
    for _ in range(3):
        starts.append(len(player.tape.deltas))
        player.play(operations)
    tape = player.tape
    peaks = replay(tape.deltas, tape.tensors, tape.streams, starts)
    return peaks[-1][0], max(reserved for _, reserved in peaks)


def _highest(tape: Tape) -> tuple[int, int]:
    """The highest sum of rounded sizes, and the entry that reaches it."""
    sums = list(accumulate(d // -GRAIN * -GRAIN if d > 0 else -(-d // -GRAIN * -GRAIN) for d in tape.deltas))
    highest = max(sums)
    return highest, sums.index(highest)


def _terms(tape: Tape, where: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for delta, term in zip(tape.deltas[: where + 1], tape.terms, strict=False):
        size = -(-abs(delta) // GRAIN) * GRAIN
        found[term] = found.get(term, 0) + (size if delta > 0 else -size)
    return {term: size for term, size in found.items() if size}


def _moment(operations: tuple[Operation, ...], index: int) -> str:
    op = operations[min(index, len(operations) - 1)]
    what = op.moment if op.kind == "compute" else op.kind
    return f"{what} of {op.unit or 'the step'}, micro-batch {op.micro}"


def at_rest(plan: Plan, description: Description, slots: int) -> dict[str, dict[str, int]]:
    """Bytes between steps, by tier and kind."""
    master = ITEM_BYTES[plan.precision.master]
    held = groups(plan, description)
    found: dict[str, dict[str, int]] = {}
    for unit in plan.units:
        group = held[unit.name]
        for kind, place, n in (
            ("params", unit.home.params, sum(group.shards)),
            ("optimizer", unit.home.optimizer, slots * sum(group.shards[i] for i in group.trained)),
        ):
            tier = found.setdefault(place, {})
            tier[kind] = tier.get(kind, 0) + n * master
    return found
