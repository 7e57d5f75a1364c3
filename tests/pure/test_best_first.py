"""The best-first search against all plans of its grid, and freer questions against those that fix choices."""

import random
from typing import Any

import pytest

from fullshard.base.errors import FullshardError
from fullshard.cluster.topology import Cluster
from fullshard.model import presets
from fullshard.plan.optimizer import AdamW
from fullshard.planner.search.best_first import WORTH
from fullshard.planner.search.exact_estimates import FullModel
from fullshard.planner.search.plan_space import PlanRequest, plan_request, strategies
from fullshard.planner.search.search import find_plan
from fullshard.planner.search.strategy_cells import cells

ASKED = [
    ("llama-1.5b", "8xh100", 2048, 64, None),
    ("llama3-8b", "64xh100", 8192, 1024, None),
    ("gpt2-xl", "4xl40s", 1024, 64, None),
]


def asked(name: str, where: str, sequence: int, rows: int, limit: int | None) -> PlanRequest:
    description, cluster = presets.describe(name), Cluster.named(where)
    return plan_request(description, cluster, sequence, rows, {}, limit and limit << 30, "chunked", AdamW())


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", ASKED, ids=lambda c: f"{c[0]}-{c[1]}")
def test_no_plan_of_the_grid_that_fits_is_faster(case):
    """The exact seconds of every plan of every plain cell."""
    request = asked(*case)
    full = FullModel(request)
    plans = [plan for s in strategies(request) for cell in cells(request, full, s.families) if cell.plain for plan in cell.plans]
    best = find_plan(request.description, request.cluster, sequence=case[2], global_batch=case[3]).estimate
    for plan in sorted(plans, key=full.seconds):
        if full.seconds(plan) >= best.step_seconds:
            break
        assert full.judge(plan).estimate is None


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", ASKED, ids=lambda c: f"{c[0]}-{c[1]}")
def test_lower_bounds_hold_for_every_plan(case):
    request = asked(*case)
    full = FullModel(request)
    for strategy in strategies(request):
        for cell in cells(request, full, strategy.families):
            assert cell.bound() <= min(full.seconds(plan) for plan in cell.plans)


def test_few_plans_are_estimated_with_the_allocator():
    """Of several hundred plans of 8B on 64 devices."""
    judged: list[int] = []
    whole = FullModel._judge

    def counted(self: FullModel, plan: Any) -> Any:
        judged.append(id(plan))
        return whole(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullModel, "_judge", counted)
        found = find_plan(presets.describe("llama3-8b"), Cluster.named("64xh100"), sequence=8192, global_batch=1024)
        assert found.considered > 300
        assert len(judged) < 12


CHOICES: dict[str, tuple[Any, ...]] = {
    "strategy": ("ddp", "zero1", "zero2", "zero3", "hybrid", "hpz"),
    "remat": ("none", "selective", "full"),
    "micro_batch": (1, 2, 4),
    "prefetch": (1, 2),
    "sync": ("every", "last"),
    "home.optimizer": ("device", "host"),
    "home.params": ("device", "host"),
    "home.activations": ("device", "host"),
}
SMALL = ("llama3.2-1b", "llama3-8b", "gpt2-xl", "llama2-13b")


def question(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is asked, and one to three choices that are fixed of it."""
    pick = random.Random(seed)
    where = pick.choice(("1xh100", "8xh100", "8xa100", "64xh100", "2xrtx4090"))
    cluster = Cluster.named(where)
    about = {
        "description": presets.describe(pick.choice(SMALL)),
        "cluster": cluster,
        "sequence": pick.choice((1024, 4096, 8192)),
        "global_batch": cluster.devices * pick.choice((1, 4)),
        "limit": pick.choice((None, None, int(0.4 * cluster.of("memory")))),
    }
    return about, {name: pick.choice(CHOICES[name]) for name in pick.sample(sorted(CHOICES), pick.randint(1, 3))}


QUICK = (4, 9, 13)  # whose searches take few seconds


@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in range(40)])
def test_a_freer_question_never_has_a_slower_answer(seed):
    about, fix = question(seed)
    try:
        fixed = find_plan(**about, fix=fix)
    except FullshardError:
        return
    free = find_plan(**about)
    assert WORTH * free.estimate.step_seconds <= fixed.estimate.step_seconds, (fix, free.plan, fixed.plan)
