"""What a contest leaves out, against looking at everything."""

import pytest

from fullshard.cluster.cluster import Cluster
from fullshard.model import presets
from fullshard.optimizer import AdamW
from fullshard.planner.estimate import available
from fullshard.planner.search import full_model
from fullshard.planner.search.bounds import SURE, Contest, Entry
from fullshard.planner.search.reduced_model import Thin
from fullshard.planner.search.search import _thin, find_plan
from fullshard.planner.search.space import Wanted, want

ASKED = [
    ("llama3-8b", "64xh100", 8192, 1024, None),
    ("llama3-8b", "8xh100", 4096, 128, 40),
    ("llama-1.5b", "8xh100", 2048, 64, None),
    ("llama3-70b", "64xh100", 4096, 512, None),
    ("gpt2-xl", "4xl40s", 1024, 64, None),
]


def asked(name: str, where: str, sequence: int, rows: int, limit: int | None) -> tuple[Wanted, Thin, int]:
    description, cluster = presets.describe(name), Cluster.named(where)
    wanted = want(description, cluster, sequence, rows, {}, limit and limit << 30, "chunked", AdamW())
    return wanted, _thin(wanted), available(cluster, wanted.limit)


@pytest.mark.parametrize("case", ASKED, ids=lambda c: f"{c[0]}-{c[1]}")
def test_nothing_is_left_out_that_would_have_won(case):
    """Every plan of every family: the first that fits, timed."""
    wanted, thin, room = asked(*case)
    contest = Contest(wanted, thin, room)
    fitting = []
    for family in contest.families:
        first = next((plan for _, plan in family if thin.needed(plan) <= room), None)
        if first is not None:
            fitting.append(thin.timeline(first).seconds)
    best = contest.fastest(contest.left)
    assert best is not None
    assert best.needed == thin.needed(best.plan) <= room
    assert best.seconds == min(fitting)


def test_most_are_not_looked_at():
    """Of 150 plans of 8B on 64 devices fewer than a third are counted, and fewer than a sixth timed."""
    wanted, thin, room = asked(*ASKED[0])
    contest = Contest(wanted, thin, room)
    contest.fastest(contest.left)
    assert sum(map(len, contest.families)) == 150
    assert len(thin.known) < 50
    assert len(thin.times) < 25


@pytest.mark.parametrize("case", ASKED, ids=lambda c: f"{c[0]}-{c[1]}")
def test_no_plan_needs_or_takes_less_than_follows_from_others(case):
    wanted, thin, room = asked(*case)
    for entry in (c for c in Contest(wanted, thin, room).all if isinstance(c, Entry)):
        for place, (label, plan) in enumerate(entry.family):
            least = entry.rising.least(plan, len(entry.family) - 1 - place, room)
            assert SURE * least <= thin.needed(plan), label
            assert thin.least(plan) <= thin.timeline(plan).seconds, label


def test_where_the_allocator_leaves_no_room_the_next_of_the_family_is_looked_at(monkeypatch):
    """Of two micro-batches of 8B selective remat fits; if it then turned out not to, full remat would."""
    tried = full_model.Whole.tried

    def no_selective(self, plan, *rest, **more):
        found = tried(self, plan, *rest, **more)
        selective = any(u.remat == "selective" for u in plan.units)
        return full_model.Tried(plan, self.room + 1) if selective else found

    monkeypatch.setattr(full_model.Whole, "tried", no_selective)
    found = find_plan(presets.describe("llama3-8b"), Cluster.named("64xh100"), sequence=8192, global_batch=256)
    assert {u.remat for u in found.plan.units if "layers" in u.name} <= {"full", "none"}
    assert found.estimate.needed <= found.estimate.available


def test_a_strategy_that_does_not_fit_says_what_its_leanest_plan_needs():
    """Which is the smallest micro-batch, counted and not followed from others."""
    wanted, thin, room = asked("llama3-8b", "64xh100", 8192, 1024, None)
    found = find_plan(wanted.description, wanted.cluster, sequence=8192, global_batch=1024)
    ddp = next(a for a in found.alternatives if a.label.startswith("ddp"))
    assert ddp.step_seconds is None
    assert ddp.plan.batch.micro_batch == 1
    assert ddp.needed == thin.needed(ddp.plan) > room
