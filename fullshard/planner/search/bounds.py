"""Candidates of a search, the one that promises most always looked at first.

Of each strategy and micro-batch one plan counts: the first of its family, which differ in remat alone, that fits. What a
plan costs is found out in three goes, and only as far as it takes: what it needs and takes at least, by what is known of
others; the bytes that it needs; its seconds.
"""

from dataclasses import dataclass, field

from fullshard.plan import Plan
from fullshard.planner.search.offload import Ladder
from fullshard.planner.search.reduced_model import Thin
from fullshard.planner.search.space import Family, Wanted, strategies
from fullshard.planner.step.schedule import largest_chunk

SURE = 0.99  # of bytes that follow from others: sizes are rounded, and some kernels' own memory grows in steps


@dataclass(eq=False)
class Candidate:
    """A plan under consideration, with what a thinned model says of it."""

    label: str
    plan: Plan
    needed: int
    seconds: float
    exposed: dict[str, float] = field(default_factory=dict)
    ladder: Ladder | None = None  # if parts of it have to leave the device
    height: float = 0.0
    sure: bool = False  # whether its height knows of the allocator


class Entry(Candidate):
    """A candidate that stays on the device: the first of its family of which nothing says that it does not fit. `judged`: whether
    the bytes that it needs are known; `timed`: whether its seconds are, which else are those of its kernels alone."""

    def __init__(self, family: Family, rising: "Rising"):
        super().__init__(*family[0], needed=0, seconds=0.0)
        self.family, self.rising, self.place = family, rising, -1
        self.judged = self.timed = False

    @property
    def leaner(self) -> int:
        """Plans of the family that are."""
        return len(self.family) - 1 - self.place

    def advance(self, room: int) -> bool:
        """To the next of the family that may fit; if there is none, to the last."""
        while self.leaner:
            self.place += 1
            self.label, self.plan = self.family[self.place]
            self.judged = self.timed = False
            self.needed = self.rising.least(self.plan, self.leaner, room)
            if SURE * self.needed <= room:
                self.seconds = self.rising.thin.least(self.plan)
                return True
        self.seconds = float("inf")
        return False

    def judge(self) -> None:
        self.needed, self.judged = self.rising.thin.needed(self.plan), True

    def time(self) -> None:
        found = self.rising.thin.timeline(self.plan)
        self.seconds, self.exposed, self.timed = found.seconds, found.exposed, True


class Rising:
    """Bytes of a strategy's plans while their micro-batches grow.

    Each moment of a step holds bytes that grow evenly with the micro-batch, once there are tokens enough for a whole chunk of
    the loss. The highest of them therefore grows as fast from one to the next, or faster, and two that are known say what a
    third needs at least. `zero3`: the same of that strategy, for those that gather as it does and keep more. Plans are told
    apart by their batch and by how many of a family are leaner.
    """

    def __init__(self, thin: Thin, families: list[Family], zero3: "Rising | None" = None):
        self.thin, self.zero3 = thin, zero3
        self.plans = {(plan.batch, len(f) - 1 - i): plan for f in families for i, (_, plan) in enumerate(f)}
        costs = thin.description.costs
        self.chunk = largest_chunk(costs.vocabulary) if costs and costs.vocabulary and thin.common["loss"] == "chunked" else 0

    def firm(self, plan: Plan, leaner: int, room: int) -> int:
        """Bytes that a plan needs; at least so many, where that is too much."""
        least = self.least(plan, leaner, room)
        return least if SURE * least > room else self.thin.needed(plan)

    def least(self, plan: Plan, leaner: int, room: int) -> int:
        """Bytes that a plan needs at least, by what smaller ones of its kind do."""
        if self.zero3 and (same := self.zero3.plans.get((plan.batch, leaner))):
            return self.zero3.firm(same, leaner, room)
        smaller = self._smaller(plan, leaner)
        if not smaller:
            return 0
        if len(smaller) == 1:
            return self.thin.needed(smaller[0])
        first, second = (self.thin.needed(p) for p in smaller)
        one, two = (p.batch.micro_batch for p in smaller)
        return second + (second - first) * (plan.batch.micro_batch - two) // (two - one)

    def _smaller(self, plan: Plan, leaner: int) -> list[Plan]:
        """The smallest two, if they are smaller, or the smallest alone where chunks still grow. One micro-batch alone keeps no
        sums of gradients, and is of another kind."""
        alike = [p for (b, n), p in self.plans.items() if n == leaner and b.accumulate > 1 and plan.batch.accumulate > 1]
        smaller = [p for p in alike if p.batch.micro_batch < plan.batch.micro_batch]
        even = [p for p in smaller if p.batch.micro_batch * p.batch.sequence >= self.chunk]
        return even[:2] if len(even) > 1 else smaller[:1]


class Contest:
    """Every strategy and micro-batch on the device alone. `left`: those that may fit; `failed`: those that do not."""

    def __init__(self, wanted: Wanted, thin: Thin, room: int):
        self.room = room
        self.families: list[Family] = []
        self.left: list[Candidate] = []
        self.failed: list[Candidate] = []
        every = [families for families in strategies(wanted) if families]
        zero3 = {_first(families).mesh.tensor: Rising(thin, families) for families in every if _is_zero3(_first(families))}
        for families in every:
            plan = _first(families)
            below = zero3.get(plan.mesh.tensor) if plan.units[0].layout == "sharded" else None
            rising = below if below and _is_zero3(plan) else Rising(thin, families, below)
            for entry in (Entry(family, rising) for family in families):
                (self.left if entry.advance(room) else self.failed).append(entry)
            self.families += families

    @property
    def all(self) -> list[Candidate]:
        return [*self.left, *self.failed]

    def fastest(self, among: list[Candidate]) -> Candidate | None:
        """Of these, by thinned models, if any fits."""
        among = [c for c in among if c not in self.failed and (isinstance(c, Entry) or c.needed <= self.room)]
        while among:
            best = min(among, key=lambda c: c.seconds)
            if not isinstance(best, Entry) or best.timed:
                return best
            if best.judged:
                best.time()
                continue
            best.judge()
            if best.needed > self.room and not self.advance(best):
                among.remove(best)
        return None

    def advance(self, candidate: Candidate) -> bool:
        """From a plan that does not fit to the next of its family, if another may."""
        if isinstance(candidate, Entry) and candidate.advance(self.room):
            return True
        self.left.remove(candidate)
        self.failed.append(candidate)
        return False

    @staticmethod
    def leanest(among: list[Candidate]) -> Candidate:
        """Of these, the one that needs the fewest bytes."""
        while isinstance(best := min(among, key=lambda c: c.needed), Entry) and not best.judged:
            best.judge()
        return best


def _first(families: list[Family]) -> Plan:
    return families[0][0][1]


def _is_zero3(plan: Plan) -> bool:
    return all(u.layout == "sharded" and u.reshard is True for u in plan.units) and plan.mesh.replicate == 1
