"""The candidate pool of a search against an exhaustive search."""

import pytest

from fullshard.cluster.topology import Cluster
from fullshard.model import presets
from fullshard.plan.optimizer import AdamW
from fullshard.planner.estimate import available
from fullshard.planner.search import exact_estimates
from fullshard.planner.search.bounds import BOUND_SHARE, CandidatePool, DeviceCandidate
from fullshard.planner.search.pick import reduced_model
from fullshard.planner.search.plan_space import PlanRequest, plan_request
from fullshard.planner.search.reduced_model import ReducedModel
from fullshard.planner.search.search import find_plan

ASKED = [
    ("llama3-8b", "64xh100", 8192, 1024, None),
    ("llama3-8b", "8xh100", 4096, 128, 40),
    ("llama-1.5b", "8xh100", 2048, 64, None),
    ("llama3-70b", "64xh100", 4096, 512, None),
    ("gpt2-xl", "4xl40s", 1024, 64, None),
]


def asked(name: str, where: str, sequence: int, rows: int, limit: int | None) -> tuple[PlanRequest, ReducedModel, int]:
    description, cluster = presets.describe(name), Cluster.named(where)
    request = plan_request(description, cluster, sequence, rows, {}, limit and limit << 30, "chunked", AdamW())
    return request, reduced_model(request), available(cluster, request.limit)


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", ASKED, ids=lambda c: f"{c[0]}-{c[1]}")
def test_nothing_is_left_out_that_would_have_won(case):
    """Every plan of every family: the first that fits, timed."""
    request, reduced, room = asked(*case)
    pool = CandidatePool(request, reduced, room)
    fitting = []
    for family in pool.families:
        first = next((plan for _, plan in family if reduced.needed(plan) <= room), None)
        if first is not None:
            fitting.append(reduced.timeline(first).seconds)
    best = pool.fastest(pool.left)
    assert best is not None
    assert best.needed == reduced.needed(best.plan) <= room
    assert best.seconds == min(fitting)


def test_most_plans_are_not_estimated():
    """Of 150 plans of 8B on 64 devices the bytes of fewer than a third are counted, and fewer than a sixth are timed."""
    request, reduced, room = asked(*ASKED[0])
    pool = CandidatePool(request, reduced, room)
    pool.fastest(pool.left)
    assert sum(map(len, pool.families)) == 150
    assert len(reduced.known) < 50
    assert len(reduced.times) < 25


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", ASKED, ids=lambda c: f"{c[0]}-{c[1]}")
def test_lower_bounds_hold_for_every_plan(case):
    request, reduced, room = asked(*case)
    for candidate in (c for c in CandidatePool(request, reduced, room).all if isinstance(c, DeviceCandidate)):
        for place, (label, plan) in enumerate(candidate.family):
            least = candidate.growth.least(plan, len(candidate.family) - 1 - place, room)
            assert BOUND_SHARE * least <= reduced.needed(plan), label
            assert reduced.least_seconds(plan) <= reduced.timeline(plan).seconds, label


def test_if_the_allocator_needs_too_much_the_next_plan_of_the_family_is_tried(monkeypatch):
    """Of two micro-batches of 8B selective remat fits; if it then turned out not to, full remat would."""
    tried = exact_estimates.FullModel.judge

    def no_selective(self, plan, *rest, **more):
        found = tried(self, plan, *rest, **more)
        selective = any(u.remat == "selective" for u in plan.units)
        return exact_estimates.FullResult(plan, self.room + 1) if selective else found

    monkeypatch.setattr(exact_estimates.FullModel, "judge", no_selective)
    found = find_plan(presets.describe("llama3-8b"), Cluster.named("64xh100"), sequence=8192, global_batch=256)
    assert {u.remat for u in found.plan.units if "layers" in u.name} <= {"full", "none"}
    assert found.estimate.needed <= found.estimate.available


def test_a_strategy_that_does_not_fit_says_what_its_leanest_plan_needs():
    """Its leanest plan has the smallest micro-batch, and its bytes are counted, not bounded."""
    request, reduced, room = asked("llama3-8b", "64xh100", 8192, 1024, None)
    found = find_plan(request.description, request.cluster, sequence=8192, global_batch=1024)
    ddp = next(a for a in found.alternatives if a.label.startswith("ddp"))
    assert ddp.step_seconds is None
    assert ddp.plan.batch.micro_batch == 1
    assert ddp.needed == reduced.needed(ddp.plan) > room
