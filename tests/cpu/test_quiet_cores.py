"""Quiet cores and disturbed ones: real threads on real cores, with a clock that is told which are which."""

import os
import threading
from collections.abc import Iterator

import pytest

from fullshard.cluster.calibration import HOPPER
from fullshard.on_torch.measuring import host_time, quiet_cores
from fullshard.on_torch.measuring.quiet_cores import NEAR, QuietCores
from fullshard.on_torch.measuring.timings import middle

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores and Linux"
)


class Neighbours:
    """Takes a second on a core, and as much longer as its neighbour makes it."""

    def __init__(self) -> None:
        self.slow = dict.fromkeys(os.sched_getaffinity(0), 1.0)

    def clock(self) -> float:
        (core,) = os.sched_getaffinity(0)
        return self.slow[core]


@pytest.fixture
def another() -> Iterator[threading.Thread]:
    """A thread that has been bound to a core by somebody else."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert thread.native_id is not None
    os.sched_setaffinity(thread.native_id, {max(os.sched_getaffinity(0))})
    yield thread
    end.set()
    thread.join()


def test_it_moves_to_a_quiet_core_and_stays_while_it_is_quiet(another):
    beside, before = Neighbours(), os.sched_getaffinity(0)
    first, *rest = sorted(before)
    beside.slow |= dict.fromkeys(rest, 1.5)
    with QuietCores(beside.clock) as here:
        assert here.settle() == 1.0
        assert os.sched_getaffinity(0) == os.sched_getaffinity(another.native_id) == {first}
        beside.slow[first] = (1 + NEAR) / 2
        assert here.settle() == (1 + NEAR) / 2
        assert os.sched_getaffinity(0) == {first}
        beside.slow[first], beside.slow[rest[0]] = 1.6, 1.01
        assert here.settle() == 1.01
        assert os.sched_getaffinity(0) == os.sched_getaffinity(another.native_id) == {rest[0]}
    assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(another.native_id) == {max(before)}


def test_where_no_core_is_quiet_the_fastest_will_do_but_is_not_called_quiet():
    beside = Neighbours()
    with QuietCores(beside.clock) as here:
        beside.slow = dict.fromkeys(beside.slow, 2.0) | {max(beside.slow): 1.5}
        assert here.settle() == 1.5
        assert os.sched_getaffinity(0) == {max(beside.slow)}
        assert not here.is_quiet(1.5)
        assert here.is_quiet(1.0)


def test_cores_come_back_after_a_failure():
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), QuietCores(Neighbours().clock):
        1 / 0
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ZeroDivisionError), QuietCores(lambda: 1 / 0):  # in the first look already
        pass
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("ranks", "count", "expected"),
    [
        (1, 16, [list(range(16))]),
        (4, 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 96, [list(range(0, 48, 3)), list(range(48, 96, 3))]),
        (3, 2, [[0, 1], [0], [1]]),
        (1, 0, [[]]),
    ],
)
def test_every_rank_of_a_node_has_cores_of_its_own(monkeypatch, ranks, count, expected):
    """By hand; the fourth has more ranks than cores, the last no way to tell them."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    for rank, own in enumerate(expected):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert quiet_cores._own(list(range(count))) == own


def test_it_goes_to_every_core_in_turn():
    beside = Neighbours()
    beside.slow = {core: 1.0 + core for core in beside.slow}
    with QuietCores(beside.clock) as here:
        assert sorted(here.first_times) == sorted(beside.slow.values())
        seen = []
        for _ in beside.slow:
            here.move()
            seen.append(here.time_core())
        assert sorted(seen) == sorted(beside.slow.values())


def test_looks_at_different_times_are_put_together():
    """By hand: the mean of the two quickest of six, and the middle of three. A CPU has no such looks."""
    looks = [{"issued": s, "saved": t} for s, t in ((5.0, 3.0), (2.0, 1.0), (4.0, 2.0))] + [
        {"issued": s} for s in (1.0, 6.0, 3.0)
    ]
    assert host_time.combine(looks) == {"issued": 1.5, "saved": 2.0}


def clocked(issued: float) -> float:
    """What a clock shows for this `issued`."""
    return issued * HOPPER.probe_ops / HOPPER.in_step_host


def test_times_of_a_gpus_host_are_those_of_its_cores_as_they_were():
    """A row of blocks took twice as long on the whole as on a quiet core; a step `disturbance` of what that is more."""
    looks = [{"issued": 15e-6, "saved": 10e-6, host_time.AVERAGE_CORE: clocked(s)} for s in (20e-6, 40e-6)]
    share = 1 + HOPPER.disturbance
    found = host_time.combine(looks)
    assert found == pytest.approx({"issued": share * 15e-6, "saved": share * 10e-6, "quiet": 1 / share})
    assert host_time.share_of(clocked(15e-6), found["issued"], found["quiet"]) == pytest.approx(found["quiet"])
    assert host_time.share_of(clocked(30e-6), found["issued"], found["quiet"]) == pytest.approx(1.0)
    assert (
        host_time.combine([{"issued": 15e-6, host_time.AVERAGE_CORE: clocked(14e-6)}])["quiet"] == 1.0
    )  # never slower where it is quiet


def test_a_host_is_held_against_what_the_same_clock_shows_on_a_quiet_one():
    assert host_time.share_of(0.0125, HOPPER.in_step_host * 0.0125 / HOPPER.probe_ops) == pytest.approx(1.0)
    assert host_time.share_of(clocked(30e-6), 15e-6) == pytest.approx(1.0 + HOPPER.disturbance)


def test_the_middle_leaves_out_an_eighth_at_each_end():
    assert middle([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -50.0]) == 3.5
    assert middle([1.0, 6.0]) == 3.5
