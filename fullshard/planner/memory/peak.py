"""The peak of a step: what is allocated, when, and of what; what the allocator reserves for it."""

from dataclasses import dataclass, field
from itertools import accumulate

from fullshard.model.description import Description
from fullshard.optimizer import AdamW, Optimizer
from fullshard.plan import Plan
from fullshard.planner.memory.allocator import GRAIN, replay
from fullshard.planner.memory.replay import Replay, Tape, Term
from fullshard.planner.step.offload_bytes import SHARE, OffloadBytes, slots_of
from fullshard.planner.step.schedule import Operation, schedule
from fullshard.planner.step.unit_sizes import groups

Alive = dict[tuple[str, str], tuple[int, int, Term, int]]


@dataclass(frozen=True)
class Peak:
    """The most that is allocated at once in a steady step, in bytes. `moment`: when; `terms`: of what.

    `reserved`: what the allocator has taken from the device by then, if it was asked for. `at_rest`: what stays between
    steps, by tier and kind. `host` and `disk`: bytes there by term, all of them at once.
    """

    allocated: int
    reserved: int | None
    moment: str
    terms: dict[str, int]
    at_rest: dict[str, dict[str, int]]
    host: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Level:
    """Bytes of a device at their highest, of the host by term, and of the device slots that state passes."""

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
) -> Peak:
    """What a steady step of `plan` takes on a rank's device, in its host's memory and on disk.

    Without `reserved`, the allocator is left out: ten times as fast, and `allocated` then lacks the ends of
    blocks that were not worth splitting, a few MiB. `clip` and `cpu_share`, the part of the pieces that the CPU updates,
    matter to units whose optimizer state rests away; their gradients count until the unit's next forward, which is later
    than they go where updates are quicker than the device.
    """
    slots = slots_of(optimizer or AdamW())
    operations = schedule(plan, description, loss=loss, micros=_different(plan), clip=clip)
    player = Replay(plan, description, slots, clip=clip, cpu_share=cpu_share)
    taken = None
    if reserved:
        starts, alike, before = _three_steps(player, description, operations)
        allocated, taken = _with_allocator(player.tape, starts, alike)
        where = _highest(player.tape, starts[-1])[1]
        terms = _terms(player.tape, starts[-1], where, before)
    else:
        allocated, where = _highest(_steady(player, description, operations).tape)
        terms = _terms(player.tape, 0, where, {})
    return Peak(
        allocated,
        taken,
        _moment(operations, player.tape.operations[where]),
        terms,
        at_rest(plan, description, slots),
        player.away.host(player.spilled.host),
        player.away.disk(player.spilled.most["disk"]),
    )


def highest(
    plan: Plan,
    description: Description,
    *,
    loss: str = "chunked",
    optimizer: Optimizer | None = None,
    clip: bool = True,
    cpu_share: float = SHARE,
) -> Level:
    """Only the bytes of `predict(…, reserved=False)`: for a search, which asks by the hundred."""
    operations = schedule(plan, description, loss=loss, micros=_different(plan), clip=clip)
    player = Replay(plan, description, slots_of(optimizer or AdamW()), clip=clip, cpu_share=cpu_share)
    player.tape = gauge = _Gauge()
    _steady(player, description, operations)
    return Level(gauge.highest, player.away.host(player.spilled.host), sum(player.away.staging()))


class _Gauge(Tape):
    """A tape that remembers nothing but how much there is, and was at most."""

    now = highest = 0
    folds = True

    def allocate(self, owner: str, tensor: str, nbytes: int, term: Term, stream: int, operation: int) -> None:
        if nbytes <= 0:
            return
        self.free(owner, tensor, operation)
        self.alive[owner, tensor] = (0, nbytes, term, stream)
        self.now += nbytes // -GRAIN * -GRAIN
        if self.now > self.highest:
            self.highest = self.now

    def rise(self, nbytes: int) -> None:
        if self.now + nbytes > self.highest:
            self.highest = self.now + nbytes

    def free(self, owner: str, tensor: str, operation: int) -> None:
        found = self.alive.pop((owner, tensor), None)
        if found is not None:
            self.now -= found[1] // -GRAIN * -GRAIN


def _different(plan: Plan) -> tuple[int, ...]:
    """Micro-batches that can have a peak of their own: the first, the second and the last."""
    last = plan.batch.accumulate - 1
    return tuple(sorted({0, min(1, last), last}))


def steady(plan: Plan, description: Description, operations: tuple[Operation, ...], slots: int) -> Tape:
    """The tape of a step that is not the first."""
    return _steady(Replay(plan, description, slots), description, operations).tape


def _steady(player: Replay, description: Description, operations: tuple[Operation, ...]) -> Replay:
    player.rest(description)
    player.states()
    player.left_over()
    player.workspaces()
    player.play(operations)
    return player


def _three_steps(player: Replay, description: Description, operations: tuple[Operation, ...]) -> tuple[list[int], bool, Alive]:
    """Where they begin on the tape, whether the last repeats the one before, and what was alive when it began. Three, since
    the allocator remembers how it began."""
    player.rest(description)
    tape, starts = player.tape, [0]
    alive: Alive | None = None
    alike = False
    for _ in range(3):
        before, alive = alive, {**tape.alive}
        alike = before is not None and _sizes(before) == _sizes(alive)
        starts.append(len(tape.deltas))
        if before is not None and alike:  # the last step left all as it found it: this one does the same
            tape.repeat(starts[-2], {entry[0]: alive[key][0] for key, entry in before.items()})
        else:
            player.play(operations)
    assert alive is not None
    return starts, alike, alive


def _sizes(alive: Alive) -> dict[tuple[str, str], tuple[object, ...]]:
    """What is alive, by everything but the numbers that a step gives anew."""
    return {key: entry[1:] for key, entry in alive.items()}


def _with_allocator(tape: Tape, starts: list[int], alike: bool) -> tuple[int, int]:
    """Peaks of (allocated, reserved) over three steps."""
    peaks = replay(tape.deltas, tape.tensors, tape.streams, starts, alike=alike)
    return peaks[-1][0], max(reserved for _, reserved in peaks)


def _highest(tape: Tape, begin: int = 0) -> tuple[int, int]:
    """How far the sum of rounded sizes rises from entry `begin` on, and the entry that brings it there."""
    sums = list(accumulate(d // -GRAIN * -GRAIN if d > 0 else -(-d // -GRAIN * -GRAIN) for d in tape.deltas[begin:]))
    highest = max(sums)
    return highest, begin + sums.index(highest)


def _terms(tape: Tape, begin: int, where: int, before: Alive) -> dict[str, int]:
    """What there is at entry `where`, of what was there `before` entry `begin` and came and went since."""
    found: dict[str, int] = {}
    for _, nbytes, term, _ in before.values():
        found[term] = found.get(term, 0) + -(-nbytes // GRAIN) * GRAIN
    for delta, term in zip(tape.deltas[begin : where + 1], tape.terms[begin : where + 1], strict=True):
        size = -(-abs(delta) // GRAIN) * GRAIN
        found[term] = found.get(term, 0) + (size if delta > 0 else -size)
    return {term: size for term, size in found.items() if size}


def _moment(operations: tuple[Operation, ...], index: int) -> str:
    op = operations[min(index, len(operations) - 1)]
    what = op.moment if op.kind == "compute" else op.kind
    return f"{what} of {op.unit or 'the step'}, micro-batch {op.micro}"


def at_rest(plan: Plan, description: Description, slots: int) -> dict[str, dict[str, int]]:
    """Bytes between steps, by tier and kind."""
    held = groups(plan, description)
    away = OffloadBytes(plan, held, slots)
    found: dict[str, dict[str, int]] = {}
    for group in held.values():
        shard = away.shard_of(group) if group.away else sum(group.shards) * away.master
        state = away.state_of(group) if group.away else slots * group.moving * away.master
        for kind, place, nbytes in (
            ("params", group.home.params, shard),
            ("optimizer", group.home.optimizer, state),
        ):
            tier = found.setdefault(place, {})
            tier[kind] = tier.get(kind, 0) + nbytes
    return found
