"""Peak memory of a step: the bytes allocated, when and of what kinds, and the bytes that the allocator reserves."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from fullshard.model.description import Description
from fullshard.plan.engine_traits import TRAITS
from fullshard.plan.optimizer import AdamW, Optimizer
from fullshard.plan.plan import Plan
from fullshard.planner.memory.allocation_tape import PeakGauge, Tape
from fullshard.planner.memory.allocator import GRAIN, replay
from fullshard.planner.memory.memory_fold import MemoryFold
from fullshard.planner.memory.steady_bytes import SteadyBytes
from fullshard.planner.step.effects import Term
from fullshard.planner.step.few_blocks import schedules
from fullshard.planner.step.lowering import LoweredStep
from fullshard.planner.step.offload_bytes import SHARE, OffloadBytes, offload_bytes, slots_of
from fullshard.planner.step.schedule import Operation, different_micro_batches, schedule
from fullshard.planner.step.xla_lowering import lowering

FOR_GOOD = ("rest", "workspace")  # owners of what the first step allocates and no later one
Alive = dict[tuple[str, str], tuple[int, int, Term, int]]


@dataclass(frozen=True)
class PeakMemory:
    """Peak bytes of a steady step. `phase`: when the peak occurs; `terms`: its bytes by kind.

    `reserved`: bytes that the allocator takes from the device; None if that was not asked for. `at_rest`: bytes that stay
    between steps, by tier and kind. `host` and `disk`: peak bytes there by kind.
    """

    allocated: int
    reserved: int | None
    phase: str
    terms: dict[str, int]
    at_rest: dict[str, dict[str, int]]
    host: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PeakBytes:
    """Peak bytes only: of the device, of the host by kind, and of the device's staging slots."""

    device: int
    host: dict[str, int]
    staging: int


def predict(
    plan: Plan,
    description: Description,
    *,
    loss: str = "chunked",
    optimizer: Optimizer | None = None,
    reserved: bool = True,
    clip: bool = True,
    cpu_share: float = SHARE,
    engine: str = "torch",
    cublas: bool = True,
) -> PeakMemory:
    """Predict the peak of a steady step of `plan` on a rank's device, in its host's memory and on disk.

    `reserved = False` leaves the allocator out. That is ten times as fast, and `allocated` is then a few MiB too low, as
    it lacks the ends of blocks that the allocator does not split. `clip` and `cpu_share` (the share of pieces that the
    CPU updates) matter only with offload. Gradients of offloaded units count until the unit's next forward, which is an
    upper bound. `engine`: which carries the plan out. On JAX there is nothing beside what is allocated. `cublas`: whether
    cuBLAS multiplies, whose workspaces count; not on a CPU.
    """
    slots = slots_of(optimizer or AdamW())
    operations = schedule(plan, description, loss=loss, micros=different_micro_batches(plan), clip=clip, engine=engine)
    away = offload_bytes(plan, description, slots, clip=clip, cpu_share=cpu_share)
    step = lowering(plan, away, engine=engine, gpu=cublas).step(operations)
    fold = _fold(Tape(), plan, description, away, engine, cublas)
    taken = None
    if reserved and TRAITS[engine].predicted:
        starts, alike, before = _three_steps(fold, step)
        allocated, taken = _with_allocator(fold.tape, starts, alike)
        where = _highest(fold.tape, starts[-1])[1]
        terms = _terms(fold.tape, starts[-1], where, before)
    else:
        fold.begin()
        fold.step(step)
        allocated, where = _highest(fold.tape)
        terms = _terms(fold.tape, 0, where, {})
    return PeakMemory(
        allocated,
        taken,
        _phase_of(operations, fold.tape.entries[where][4]),
        terms,
        at_rest(plan, description, slots),
        away.host(fold.spilled.host),
        away.disk(fold.spilled.most["disk"]),
    )


def peak_bytes(
    plan: Plan,
    description: Description,
    *,
    loss: str = "chunked",
    optimizer: Optimizer | None = None,
    clip: bool = True,
    cpu_share: float = SHARE,
    engine: str = "torch",
) -> PeakBytes:
    """The bytes of `predict(…, reserved=False)` alone. Faster: a search asks for hundreds of plans."""
    slots = slots_of(optimizer or AdamW())
    away = offload_bytes(plan, description, slots, clip=clip, cpu_share=cpu_share)
    how: dict[str, Any] = {"whole": away.backlog is not None, "loss": loss, "clip": clip, "engine": engine}
    for few, found in schedules(plan, description, different_micro_batches(plan), marked=away.staying, **how):
        fold = _fold(gauge := PeakGauge(), plan, description, away, engine)
        watch = SteadyBytes(few, gauge, fold.spilled) if few else None
        fold.begin()
        if fold.step(lowering(plan, away, engine=engine).step(found), watch):
            break
    return PeakBytes(watch.highest if watch else gauge.highest, away.host(fold.spilled.host), sum(away.staging()))


def most_by_term(
    plan: Plan,
    description: Description,
    groups: dict[Term, str],
    *,
    loss: str = "chunked",
    optimizer: Optimizer | None = None,
    clip: bool = True,
    cpu_share: float = SHARE,
    engine: str = "torch",
    cublas: bool = True,
) -> dict[str, int]:
    """The most bytes of each group of terms during a steady step. Groups peak at different times, so the sum is above the peak.

    `groups`: the name of a term's group.
    """
    operations = schedule(plan, description, loss=loss, micros=different_micro_batches(plan), clip=clip, engine=engine)
    slots = slots_of(optimizer or AdamW())
    tape = steady(plan, description, operations, slots, clip=clip, cpu_share=cpu_share, engine=engine, cublas=cublas)
    now, most = dict.fromkeys(groups.values(), 0), dict.fromkeys(groups.values(), 0)
    for delta, term, *_ in tape.entries:
        name = groups[term]
        now[name] += delta
        most[name] = max(most[name], now[name])
    return most


def steady(
    plan: Plan,
    description: Description,
    operations: tuple[Operation, ...],
    slots: int,
    *,
    clip: bool = True,
    cpu_share: float = SHARE,
    engine: str = "torch",
    cublas: bool = True,
) -> Tape:
    """The tape of a steady step: one that is not the first."""
    away = offload_bytes(plan, description, slots, clip=clip, cpu_share=cpu_share)
    fold = _fold(Tape(), plan, description, away, engine, cublas)
    fold.begin()
    fold.step(lowering(plan, away, engine=engine, gpu=cublas).step(operations))
    return fold.tape


def _fold(tape: Tape, plan: Plan, description: Description, away: OffloadBytes, engine: str, cublas: bool = True) -> MemoryFold:
    """XLA's products take their workspaces from its temporaries."""
    return MemoryFold(tape, plan, description, away, cublas=cublas and not TRAITS[engine].one_program)


def _three_steps(fold: MemoryFold, step: LoweredStep) -> tuple[list[int], bool, Alive]:
    """Play three steps, after which the allocator is in its steady state. Return where each begins on the tape, whether the
    last repeats the one before, and what was alive when it began."""
    fold.rest()
    tape, starts = fold.tape, [0]
    alive: Alive | None = None
    alike = False
    for _ in range(3):
        before, alive = alive, {**tape.alive}
        alike = before is not None and _sizes(before) == _sizes(alive)
        starts.append(len(tape.entries))
        if before is not None and (once := _once(before, alive)):  # what the first step left stays, and nothing else is new
            tape.repeat(starts[-2], {}, once)
        elif before is not None and alike:  # the last step left everything as it found it, so this one repeats it
            tape.repeat(starts[-2], {entry[0]: alive[key][0] for key, entry in before.items()})
        else:
            fold.step(step)
    assert alive is not None
    return starts, alike, alive


def _once(before: Alive, after: Alive) -> set[int]:
    """The numbers of what the first step allocated for good; empty if it left something else behind."""
    new = {key: entry[0] for key, entry in after.items() if key not in before}
    for_good = all(owner in FOR_GOOD for owner, _ in new) and all(after.get(key) == entry for key, entry in before.items())
    return set(new.values()) if for_good else set()


def _sizes(alive: Alive) -> dict[tuple[str, str], tuple[object, ...]]:
    """What is alive, without the numbers, which differ from step to step."""
    return {key: entry[1:] for key, entry in alive.items()}


def _with_allocator(tape: Tape, starts: list[int], alike: bool) -> tuple[int, int]:
    """Peaks of (allocated, reserved) over three steps."""
    numbers, streams = [entry[2] for entry in tape.entries], [entry[3] for entry in tape.entries]
    peaks = replay(tape.deltas, numbers, streams, starts, alike=alike)
    return peaks[-1][0], max(reserved for _, reserved in peaks)


def _highest(tape: Tape, begin: int = 0) -> tuple[int, int]:
    """The highest sum of rounded sizes from entry `begin` on, and the entry that reaches it."""
    sums = list(accumulate(d // -GRAIN * -GRAIN if d > 0 else -(-d // -GRAIN * -GRAIN) for d, *_ in tape.entries[begin:]))
    highest = max(sums)
    return highest, begin + sums.index(highest)


def _terms(tape: Tape, begin: int, where: int, before: Alive) -> dict[str, int]:
    """Bytes by kind at entry `where`: what was alive `before` entry `begin`, and what came and went since."""
    found: dict[str, int] = {}
    for _, nbytes, term, _ in before.values():
        found[term] = found.get(term, 0) + -(-nbytes // GRAIN) * GRAIN
    for delta, term, *_ in tape.entries[begin : where + 1]:
        size = -(-abs(delta) // GRAIN) * GRAIN
        found[term] = found.get(term, 0) + (size if delta > 0 else -size)
    return {term: size for term, size in found.items() if size}


def _phase_of(operations: tuple[Operation, ...], index: int) -> str:
    op = operations[min(index, len(operations) - 1)]
    what = op.phase if op.kind == "compute" else op.kind
    return f"{what} of {op.unit or 'the step'}, micro-batch {op.micro}"


def at_rest(plan: Plan, description: Description, slots: int) -> dict[str, dict[str, int]]:
    """Bytes that stay between steps, by tier and kind."""
    away = offload_bytes(plan, description, slots)
    found: dict[str, dict[str, int]] = {}
    for sizes in away.groups.values():
        shard = away.shard_of(sizes) if sizes.away else sum(sizes.shards) * away.master
        state = away.state_of(sizes) if sizes.away else slots * sizes.moment_bytes(plan.precision)
        for kind, place, nbytes in (
            ("params", sizes.home.params, shard),
            ("optimizer", sizes.home.optimizer, state),
        ):
            tier = found.setdefault(place, {})
            tier[kind] = tier.get(kind, 0) + nbytes
    return found
