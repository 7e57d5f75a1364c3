"""The spans of a step add up to the busy seconds of its lanes, and lie in the step one after the other."""

import itertools

import pytest

import fullshard as fs
from fullshard.cluster.topology import Cluster
from fullshard.model import presets
from fullshard.planner.time.lane_spans import StepSpans, lane_spans
from fullshard.planner.time.timeline import timeline

WHERE = Cluster.named("8xh100")


def made(accumulate: int = 1, **more) -> fs.Plan:
    batch, precision = fs.Batch(1, 2048, accumulate), fs.Precision(compute="bf16")
    return fs.zero3(presets.describe("llama-1.5b"), devices=8, batch=batch, precision=precision, **more)


def spans(plan: fs.Plan) -> StepSpans:
    return lane_spans(plan, presets.describe("llama-1.5b"), WHERE)


def seconds(found: StepSpans, lane: str) -> float:
    return sum(s.end - s.start for s in found.spans if s.lane == lane)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_spans_add_up_to_the_busy_seconds_of_each_lane(accumulate):
    plan = made(accumulate)
    expected = timeline(plan, presets.describe("llama-1.5b"), WHERE, spread=0.0)
    found = spans(plan)
    assert found.left_out == 0
    for lane in ("gather", "reduce"):
        assert seconds(found, lane) == pytest.approx(expected.busy[lane], rel=0.01)
    crowding = expected.exposed.get("crowding", 0.0)
    assert seconds(found, "compute") == pytest.approx(expected.busy["compute"] + crowding, rel=0.01)


@pytest.mark.parametrize("home", [fs.Home(), fs.Home(optimizer="host"), fs.Home(optimizer="disk")])
def test_spans_of_a_lane_follow_each_other_within_the_step(home):
    found = spans(made(home=home))
    lanes = {s.lane for s in found.spans}
    assert {"compute", "gather", "reduce"} <= lanes
    assert ("pcie_up" in lanes) == (home.optimizer != "device")
    assert ("disk" in lanes) == (home.optimizer == "disk")
    for lane in lanes:
        own = [s for s in found.spans if s.lane == lane]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own))
    assert min(s.start for s in found.spans) >= 0
    assert max(s.end for s in found.spans) == pytest.approx(found.seconds)


def test_of_many_micro_batches_the_first_two_and_the_last_are_drawn():
    many, three = spans(made(16)), spans(made(3))
    assert many.left_out == 13
    assert len(many.spans) == len(three.spans)


def test_compute_says_what_it_does():
    found = [s for s in spans(made()).spans if s.lane == "compute"]
    order = [what for what, _ in itertools.groupby(s.what for s in found if s.what in ("forward", "loss", "backward"))]
    assert (order[0], order[-1]) == ("forward", "backward")
    assert order.index("loss") < order.index("backward") == len(order) - 1
    assert found[-1].what == "update"
