"""Step times of plans with offload: lanes computed by hand, lower bounds, and measured steps."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullshard as fs
from fullshard import Home
from fullshard.cluster.topology import Cluster, Measured
from fullshard.model import presets
from fullshard.planner.step.offload_bytes import pieces
from fullshard.planner.step.schedule import schedule
from fullshard.planner.step.unit_sizes import unit_sizes
from fullshard.planner.time.offload_lanes import Calendar, balance, rates
from fullshard.planner.time.step_lanes import Timeline
from fullshard.planner.time.timeline import timeline

MODEL = presets.describe("llama-3.6b")
RESULTS = Path(__file__).parents[2] / "benchmarks/results/2026-11-15-time-h200.json"
HOST = Home(optimizer="host")


def cluster(name: str = "1xh200", **host) -> Cluster:
    found = Cluster.named(name)
    return dataclasses.replace(found, node=dataclasses.replace(found.node, host=dataclasses.replace(found.node.host, **host)))


def measured() -> Cluster:
    data = Cluster.named("1xh200").to_dict()
    return Cluster.from_dict(json.loads(json.dumps(data | {"measured": json.loads(RESULTS.read_text())["cluster"]})))


def plan(home: Home = Home(), *, accumulate: int = 1, remat: str = "full") -> fs.Plan:  # noqa: B008
    batch = fs.Batch(2, 4096, accumulate)
    made = fs.zero3(MODEL, devices=1, precision=fs.Precision(compute="bf16"), batch=batch, remat=remat)
    return made.change("*layers*", home=home) if home.activations != "device" else made.change("*", home=home)


def run(made: fs.Plan, where: Cluster, **more) -> Timeline:
    return timeline(made, MODEL, where, spread=0.0, **more)


SLOW = {"pcie_up": 1e9, "pcie_down": 1e9, "pcie_both": 2e9}
FAST = {"pcie_up": 1e15, "pcie_down": 1e15, "pcie_both": 2e15, "adamw": 1e-18, "disk_read": 1e15, "disk_write": 1e15}


# -- lanes --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 20)), max_size=40))
def test_a_lane_does_one_thing_at_a_time_and_never_idles_before_work_that_is_ready(jobs):
    """Against a lane of whole seconds that are ticked off one by one."""
    lane, taken = Calendar(), set()
    for ready, seconds in jobs:
        at, left = ready, seconds
        while left:
            if at not in taken:
                taken.add(at)
                left -= 1
            at += 1
        assert lane.take(ready, seconds) == at
    assert sum(b - a for a, b in zip(lane.starts, lane.ends, strict=True)) == len(taken)


def test_streamed_state_crosses_pcie_once_each_way():
    found = run(plan(HOST), cluster(pcie_both=2e9), cpu_share=0)
    assert found.busy["pcie_up"] == pytest.approx(10 * MODEL.numel / 1e9, rel=1e-9)
    assert found.busy["pcie_down"] == pytest.approx(10 * MODEL.numel / 1e9, rel=1e-9)
    assert "cpu" not in found.busy
    disk = run(plan(Home(optimizer="disk")), cluster(pcie_both=2e9), cpu_share=0)
    assert disk.busy["pcie_up"] == pytest.approx(12 * MODEL.numel / 1e9, rel=1e-9)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(("accumulate", "gradient"), [(1, 2), (2, 4)])  # of one micro-batch on one device, and of several
def test_cores_see_gradients_come_down_and_send_parameters_up(clip, accumulate, gradient):
    found = run(plan(HOST, accumulate=accumulate), cluster(**SLOW, adamw=1e-9), cpu_share=1, clip=clip)
    assert found.busy["pcie_down"] == pytest.approx(gradient * MODEL.numel / 1e9, rel=1e-9)
    assert found.busy["pcie_up"] == pytest.approx(2 * MODEL.numel / 1e9, rel=1e-9)
    assert found.busy["cpu"] == pytest.approx(MODEL.numel * 1e-9, rel=1e-9)


def test_state_on_disk_is_read_and_written_once():
    found = run(plan(Home(optimizer="disk")), cluster(disk_read=2e9, disk_write=1e9))
    assert found.busy["disk"] == pytest.approx(12 * MODEL.numel * (1 / 2e9 + 1 / 1e9), rel=1e-9)
    assert found.seconds == pytest.approx(found.busy["disk"], rel=0.05)


def with_disk(**rates) -> Cluster:
    return dataclasses.replace(Cluster.named("1xh200"), measured=Measured("by hand", "bf16", **rates))


def test_a_disk_uses_its_rate_of_both_at_once_while_it_does_both():
    """As on an H200's machine: 2.08 GB/s read, 1.55 written, 2.6 together. Of N pieces, 4 are read and 4 written alone."""
    alone = {"disk_read": 2.08e9, "disk_write": 1.55e9}
    made = plan(Home(optimizer="disk"))
    in_turn, at_once = (run(made, with_disk(**alone, **more)) for more in ({}, {"disk_both": 2.6e9}))
    sizes = [12 * p.elements for p in pieces(unit_sizes(made, MODEL), 0.5)]
    pair = 1 / 2.08e9 + 1 / 1.55e9
    assert in_turn.busy["disk"] == pytest.approx(sum(sizes) * pair, rel=1e-9)
    assert at_once.busy["disk"] == pytest.approx(
        (sum(sizes[4:]) / 2.08e9 + sum(sizes[:-4]) / 1.55e9) * (2 / 2.6e9) / pair
        + sum(sizes[:4]) / 2.08e9
        + sum(sizes[-4:]) / 1.55e9
    )
    assert at_once.seconds == pytest.approx(at_once.busy["disk"], rel=0.05)
    assert 0.68 < at_once.seconds / in_turn.seconds < 0.75


def test_without_a_rate_of_both_at_once_a_disk_does_one_after_the_other():
    where = with_disk(disk_read=2e9, disk_write=1e9)
    assert where.of("disk_both") == pytest.approx(2 / (1 / 2e9 + 1 / 1e9))
    assert where.source_of("disk_both") == "nominal"
    old = where.to_dict()
    del old["measured"]["disk_both"]  # as a file from before it was measured
    assert Cluster.from_dict(json.loads(json.dumps(old))) == where


@pytest.mark.parametrize("accumulate", [1, 4, 9])
def test_parameters_on_the_host_come_up_twice_a_micro_batch(accumulate):
    found = run(plan(Home(params="host"), accumulate=accumulate), cluster(pcie_up=10e9, pcie_down=5e9))
    blocks = MODEL.numel - sum(u.numel for u in MODEL.units if u.name == "head")  # which stays whole for backward
    assert found.busy["pcie_up"] == pytest.approx(2 * accumulate * 2 * MODEL.numel / 10e9, rel=0.1)
    assert found.busy["pcie_up"] >= 2 * accumulate * (2 * blocks) / 10e9
    assert found.busy["pcie_down"] == pytest.approx(2 * MODEL.numel / 5e9, rel=1e-6)


def test_parameters_on_disk_are_read_as_often_as_they_come_up_and_written_once():
    where = cluster(disk_read=2e9, disk_write=1e9, pcie_up=10e9)
    found, on_host = (run(plan(Home(p, "host"), accumulate=2), where, cpu_share=1) for p in ("disk", "host"))
    shards = on_host.busy["pcie_up"] * 10e9  # the cores narrow what they send nowhere
    assert found.busy["disk"] == pytest.approx(shards / 2e9 + 2 * MODEL.numel / 1e9, rel=1e-9)
    assert found.seconds == pytest.approx(found.busy["disk"], rel=0.05)
    assert found.seconds >= found.busy["disk"]


# -- steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(
    "home", [HOST, Home("host", "host"), Home(optimizer="disk"), Home("disk", "disk"), Home("host", "host", "host")], ids=str
)
def test_what_costs_nothing_to_move_costs_nothing(home, clip):
    away, resident = (run(plan(h, accumulate=2), cluster(**FAST), clip=clip, cpu_share=0) for h in (home, Home()))
    assert away.seconds <= resident.seconds * 1.01


@pytest.mark.parametrize("clip", [True, False])
def test_a_slow_link_bounds_the_step(clip):
    found = run(plan(HOST), cluster(**SLOW), clip=clip, cpu_share=0)
    assert found.seconds == pytest.approx(found.busy["pcie_up"], rel=0.05)
    assert found.exposed["update"] > 0.9 * (found.seconds - found.busy["compute"])


def test_backward_waits_for_the_lanes_where_few_gradients_may_wait():
    """With very slow links updates delay backward instead of the next forward, by the same seconds."""
    made, where = plan(HOST), cluster(**SLOW)
    free, bound = (run(dataclasses.replace(made, backlog=b), where, clip=False, cpu_share=0) for b in (None, 8))
    assert bound.busy == pytest.approx(free.busy)
    assert free.seconds <= bound.seconds <= 1.05 * free.seconds
    assert run(dataclasses.replace(made, backlog=8), where).seconds == run(made, where).seconds  # all wait for the norm
    quick = cluster(**FAST)
    assert run(dataclasses.replace(made, backlog=1), quick, clip=False).seconds <= 1.01 * run(made, quick, clip=False).seconds


def test_the_fewer_gradients_may_wait_the_longer_a_step():
    made, where = plan(HOST), cluster(pcie_both=60e9, adamw=0.5e-9)
    seconds = [run(dataclasses.replace(made, backlog=b), where, clip=False).seconds for b in (None, 64, 16, 8, 2)]
    assert all(later >= 0.995 * sooner for sooner, later in itertools.pairwise(seconds))
    assert seconds[-1] > seconds[0]


def test_no_step_is_faster_than_its_floors():
    for home in (HOST, Home("host", "host"), Home("host", "host", "host"), Home(optimizer="disk"), Home("disk", "disk")):
        for clip in (True, False):
            found = run(plan(home), measured(), clip=clip)
            floor = max(found.busy[lane] for lane in found.busy if lane != "host")
            assert found.seconds >= (1 - 1e-12) * floor


def test_updates_hide_behind_more_micro_batches():
    shares = []
    for accumulate in (1, 2, 4, 16):
        away, resident = (run(plan(h, accumulate=accumulate), measured()) for h in (HOST, Home()))
        shares.append(resident.seconds / away.seconds)
    assert shares == sorted(shares)
    assert shares[-1] > 0.92


def test_state_that_waits_for_the_norm_comes_up_under_all_micro_batches():
    """From the first backward on, as the engine sends for it: three quarters of a step of four are long enough for all of
    it, a backward alone is not."""
    many, few = (dataclasses.replace(plan(HOST, accumulate=4), staging=n) for n in (108, 16))
    resident = run(plan(accumulate=4), measured()).seconds
    assert run(many, measured(), cpu_share=0).seconds < 1.01 * resident
    assert run(few, measured(), cpu_share=0).seconds > 1.1 * resident
    single, alone = dataclasses.replace(many, batch=fs.Batch(2, 4096)), run(plan(), measured()).seconds
    assert run(single, measured(), cpu_share=0).seconds > 1.1 * alone


def test_more_offloaded_units_and_slower_links_are_never_faster():
    names = [u.name for u in MODEL.units]
    seconds = []
    for k in range(0, len(names) + 1, 8):
        made = plan()
        for name in names[len(names) - k :]:
            made = made.change(name, home=HOST)
        seconds.append(run(made, cluster()).seconds)
    assert all(later >= 0.995 * sooner for sooner, later in itertools.pairwise(seconds))
    rates = [run(plan(HOST), cluster(pcie_both=rate), cpu_share=0).seconds for rate in (200e9, 94e9, 40e9, 10e9)]
    assert rates == sorted(rates)


# Seconds of steps of 3.6B on an H200 (benchmarks/results/2026-11-15-homes-h200.json), with the rates of that call.
SEEN = [
    (0.685, {"clip": False, "cpu_share": 0.375}, {}),
    (0.839, {"cpu_share": 0.25}, {"staging": 48}),
    (0.794, {"cpu_share": 0.25}, {"staging": 64}),
    (0.811, {"cpu_share": 0.125}, {"staging": 64}),
    (8.151, {"cpu_share": 0.25}, {"staging": 48, "batch": fs.Batch(2, 4096, 16)}),
]
RATES = {"pcie_both": 100.7e9, "pcie_beside": 77e9, "adamw": 0.239e-9, "adamw_beside": 0.385e-9}
# The same with four micro-batches and clipping (2026-11-16-homes-h200.json).
SEEN_LATER = [
    (2.023, {"cpu_share": 0.125}, {"staging": 72, "batch": fs.Batch(2, 4096, 4)}),
]
RATES_LATER = {"pcie_both": 97.4e9, "pcie_beside": 79.6e9, "adamw": 0.390e-9, "adamw_beside": 0.517e-9}


@pytest.mark.parametrize(
    ("seconds", "how", "changed", "rates"), [(*s, RATES) for s in SEEN] + [(*s, RATES_LATER) for s in SEEN_LATER]
)
def test_measured_steps_are_predicted_within_a_tenth(seconds, how, changed, rates):
    where = measured()
    assert where.measured is not None
    where = dataclasses.replace(where, measured=dataclasses.replace(where.measured, **rates))
    made = dataclasses.replace(plan(HOST), **changed)
    assert run(made, where, loss="plain", **how).seconds == pytest.approx(seconds, rel=0.1)


def test_activations_move_beside_compute():
    found = run(plan(Home(activations="host"), remat="full"), measured())
    assert found.seconds < 1.03 * run(plan(), measured()).seconds
    assert found.busy["pcie_up"] == pytest.approx(found.busy["pcie_down"], rel=0.01)


def test_activations_on_disk_take_what_the_disk_takes():
    """Each byte once each way: a slow disk sets the pace, one that takes no time costs a wait for the way up."""
    made, hosted = (plan(Home(activations=place), remat="none") for place in ("disk", "host"))
    nbytes = sum(op.nbytes for op in schedule(made, MODEL) if op.kind == "spill")
    slow = run(made, cluster(disk_read=1e9, disk_write=0.5e9))
    assert slow.busy["disk"] == pytest.approx(nbytes / 1e9 + nbytes / 0.5e9, rel=1e-9)
    assert slow.seconds > slow.busy["disk"]
    quick, host = run(made, cluster(disk_read=1e15, disk_write=1e15)), run(hosted, cluster())
    assert quick.busy["pcie_up"] == pytest.approx(host.busy["pcie_up"], rel=1e-9)
    assert host.seconds < quick.seconds < host.seconds + 1.01 * quick.busy["pcie_up"]


def test_lanes_that_work_at_once_have_the_rates_that_were_measured_at_once():
    """An H200 and 16 cores: 47 GB/s each way over PCIe, 39 while the cores update at 0.22 ns a parameter."""
    timed = Measured("here", "bf16", pcie_both=94e9, adamw=0.20e-9, pcie_beside=78e9, adamw_beside=0.22e-9)
    where = dataclasses.replace(cluster(), measured=timed)
    mixed, streamed = (run(plan(HOST), where, cpu_share=share, clip=False) for share in (0.5, 0.0))
    by_cores = sum(p.elements for p in pieces(unit_sizes(plan(HOST), MODEL), 0.5) if p.lane == "cpu")
    assert mixed.busy["cpu"] == pytest.approx(by_cores * 0.22e-9, rel=1e-9)
    assert mixed.busy["pcie_up"] == pytest.approx((10 * (MODEL.numel - by_cores) + 2 * by_cores) / 39e9, rel=1e-9)
    assert streamed.busy["pcie_up"] == pytest.approx(10 * MODEL.numel / 47e9, rel=1e-9)


def test_rates_at_once_follow_from_those_alone_where_they_were_not_measured():
    where = dataclasses.replace(cluster(), measured=Measured("here", "bf16", pcie_both=100e9, adamw=0.17e-9))
    assert where.of("pcie_beside") == pytest.approx(85e9)
    assert where.of("adamw_beside") == pytest.approx(0.2e-9)
    assert where.source_of("pcie_beside") == "nominal"


# -- balance ------------------------------------------------------------------------------------------------


def test_the_share_of_the_cores_follows_the_rates():
    made = plan(HOST)
    assert balance(cluster(adamw=1e-15), made, 2) == 1.0
    assert balance(cluster(adamw=1e-3), made, 2) == 0.0
    # 20 bytes of packed state take as long as the cores and the 4 bytes that they send: half of the pieces each.
    assert balance(cluster(pcie_both=1e11, adamw=0.24e-9), made, 2) == 0.5
    assert balance(cluster(pcie_both=1e11, adamw=0.28e-9), plan(Home(optimizer="disk")), 2) == 0.5
    shares = [balance(cluster(adamw=a * 1e-10), made, 2) for a in range(1, 40)]
    assert shares == sorted(shares, reverse=True)
    assert all(8 * s == int(8 * s) for s in shares)


def test_the_cores_take_longer_with_low_bit_state():
    """Sixteen cores, of which ten update: at least as long as the arithmetic of one core takes, over ten."""
    for moments, rounding, each in (("int8", "nearest", 2.8e7), ("bf16", "nearest", 7.9e7)):
        precision = fs.Precision("bf16", moments=moments, rounding=rounding)
        made = dataclasses.replace(plan(HOST), precision=precision)
        assert rates(cluster(cores=16), made, 2, at_once=False)[1] == pytest.approx(1 / (10 * each))
        assert rates(cluster(cores=16, adamw=1e-3), made, 2, at_once=False)[1] > 1e-4  # memory may be slower still
        assert balance(cluster(cores=16), made, 2) < balance(cluster(cores=16), plan(HOST), 2)


def test_the_balanced_share_is_the_fastest():
    where = measured()
    seconds = {e / 8: run(plan(HOST), where, clip=False, cpu_share=e / 8).seconds for e in range(9)}
    assert seconds[balance(where, plan(HOST), 2)] <= 1.02 * min(seconds.values())
