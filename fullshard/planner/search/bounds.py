"""The candidates of a search that keep everything on the device, judged in order of their lower bounds.

Plans of a family differ in remat alone, and only the first that fits counts. What a plan costs is found in three stages,
each only if the one before does not rule the plan out: lower bounds from plans that are known already, then the bytes
that it needs, then its seconds.
"""

from dataclasses import dataclass, field

from fullshard.plan.plan import Plan
from fullshard.planner.search.offload_levels import OffloadLevels
from fullshard.planner.search.plan_space import Family, PlanRequest, strategies
from fullshard.planner.search.reduced_model import ReducedModel
from fullshard.planner.step.schedule import largest_chunk

# Extrapolated bytes count with this share: sizes are rounded, and the workspaces of some kernels grow in steps.
BOUND_SHARE = 0.99


@dataclass(eq=False)
class Candidate:
    """A plan under consideration, with its bytes and seconds by the reduced model."""

    label: str
    plan: Plan
    needed: int
    seconds: float
    exposed: dict[str, float] = field(default_factory=dict)
    offload: OffloadLevels | None = None  # set if parts of it have to leave the device
    level: float = 0.0  # how much leaves
    with_slack: bool = False  # True if `level` allows for what the allocator adds


class DeviceCandidate(Candidate):
    """A candidate with everything on the device: the first plan of its family that may fit.

    `judged`: True if `needed` is known, else it is a lower bound. `timed`: the same of `seconds`.
    """

    def __init__(self, family: Family, growth: "MemoryGrowth"):
        super().__init__(*family[0], needed=0, seconds=0.0)
        self.family, self.growth, self.place = family, growth, -1
        self.judged = self.timed = False

    @property
    def leaner(self) -> int:
        """Number of plans of the family that need less memory."""
        return len(self.family) - 1 - self.place

    def advance(self, room: int) -> bool:
        """Go to the next plan of the family that may fit; return False if there is none."""
        while self.leaner:
            self.place += 1
            self.label, self.plan = self.family[self.place]
            self.judged = self.timed = False
            self.needed = self.growth.least(self.plan, self.leaner, room)
            if BOUND_SHARE * self.needed <= room:
                self.seconds = self.growth.reduced.least_seconds(self.plan)
                return True
        self.seconds = float("inf")
        return False

    def judge(self) -> None:
        self.needed, self.judged = self.growth.reduced.needed(self.plan), True

    def time(self) -> None:
        found = self.growth.reduced.timeline(self.plan)
        self.seconds, self.exposed, self.timed = found.seconds, found.exposed, True


class MemoryGrowth:
    """Lower bounds of the bytes of a strategy's plans, from plans with smaller micro-batches.

    At each phase of a step the bytes grow linearly with the micro-batch, once it fills a chunk of the loss. The peak is the
    largest of them, so it is convex: two known micro-batches bound every larger one from below.
    `zero3`: the same of zero3, which bounds strategies that gather like it and keep more. A plan is identified by its batch
    and by the number of leaner plans in its family.
    """

    def __init__(self, reduced: ReducedModel, families: list[Family], zero3: "MemoryGrowth | None" = None):
        self.reduced, self.zero3 = reduced, zero3
        self.plans = {(plan.batch, len(f) - 1 - i): plan for f in families for i, (_, plan) in enumerate(f)}
        costs = reduced.description.costs
        chunked = costs and costs.vocabulary and reduced.arguments["loss"] == "chunked"
        jax = reduced.arguments.get("engine") == "jax"
        self.chunk = largest_chunk(costs.vocabulary, small=jax) if costs and chunked else 0

    def needed(self, plan: Plan, leaner: int, room: int) -> int:
        """Bytes that a plan needs; a lower bound if that alone does not fit."""
        least = self.least(plan, leaner, room)
        return least if BOUND_SHARE * least > room else self.reduced.needed(plan)

    def least(self, plan: Plan, leaner: int, room: int) -> int:
        """A lower bound of the bytes that a plan needs."""
        if self.zero3 and (same := self.zero3.plans.get((plan.batch, leaner))):
            return self.zero3.needed(same, leaner, room)
        smaller = self._smaller(plan, leaner)
        if not smaller:
            return 0
        if len(smaller) == 1:
            return self.reduced.needed(smaller[0])
        first, second = (self.reduced.needed(p) for p in smaller)
        one, two = (p.batch.micro_batch for p in smaller)
        return second + (second - first) * (plan.batch.micro_batch - two) // (two - one)

    def _smaller(self, plan: Plan, leaner: int) -> list[Plan]:
        """The two smallest micro-batches below the plan's that fill a chunk of the loss, else the smallest alone.

        Plans without accumulation keep no sums of gradients, so they are never compared with others.
        """
        alike = [p for (b, n), p in self.plans.items() if n == leaner and b.accumulate > 1 and plan.batch.accumulate > 1]
        smaller = [p for p in alike if p.batch.micro_batch < plan.batch.micro_batch]
        even = [p for p in smaller if p.batch.micro_batch * p.batch.sequence >= self.chunk]
        return even[:2] if len(even) > 1 else smaller[:1]


class CandidatePool:
    """A candidate for every strategy and micro-batch. `left`: those that may fit; `failed`: those that do not."""

    def __init__(self, request: PlanRequest, reduced: ReducedModel, room: int):
        self.room = room
        self.families: list[Family] = []
        self.left: list[Candidate] = []
        self.failed: list[Candidate] = []
        every = [families for families in strategies(request) if families]
        zero3 = {
            _first(families).mesh.tensor: MemoryGrowth(reduced, families) for families in every if _is_zero3(_first(families))
        }
        for families in every:
            plan = _first(families)
            below = zero3.get(plan.mesh.tensor) if plan.units[0].layout == "sharded" else None
            growth = below if below and _is_zero3(plan) else MemoryGrowth(reduced, families, below)
            for candidate in (DeviceCandidate(family, growth) for family in families):
                (self.left if candidate.advance(room) else self.failed).append(candidate)
            self.families += families

    @property
    def all(self) -> list[Candidate]:
        return [*self.left, *self.failed]

    def fastest(self, among: list[Candidate]) -> Candidate | None:
        """The fastest of these that fits by the reduced model, or None."""
        among = [c for c in among if c not in self.failed and (isinstance(c, DeviceCandidate) or c.needed <= self.room)]
        while among:
            best = min(among, key=lambda c: c.seconds)
            if not isinstance(best, DeviceCandidate) or best.timed:
                return best
            if best.judged:
                best.time()
                continue
            best.judge()
            if best.needed > self.room and not self.advance(best):
                among.remove(best)
        return None

    def advance(self, candidate: Candidate) -> bool:
        """Replace a plan that does not fit by the next of its family; return False if none may fit."""
        if isinstance(candidate, DeviceCandidate) and candidate.advance(self.room):
            return True
        self.left.remove(candidate)
        self.failed.append(candidate)
        return False

    @staticmethod
    def leanest(among: list[Candidate]) -> Candidate:
        """The one of these that needs the fewest bytes."""
        while isinstance(best := min(among, key=lambda c: c.needed), DeviceCandidate) and not best.judged:
            best.judge()
        return best


def _first(families: list[Family]) -> Plan:
    return families[0][0][1]


def _is_zero3(plan: Plan) -> bool:
    return all(u.layout == "sharded" and u.reshard is True for u in plan.units) and plan.mesh.replicate == 1
