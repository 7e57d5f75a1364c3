"""Cores that nobody disturbs: real threads on real cores, with a clock that is told which of them are disturbed."""

import os
import threading
from collections.abc import Iterator

import pytest

from fullshard.on_torch.measuring import paces, quiet
from fullshard.on_torch.measuring.quiet import NEAR, Quiet

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores and Linux"
)


class Cores:
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
    cores, before = Cores(), os.sched_getaffinity(0)
    first, *rest = sorted(before)
    cores.slow |= dict.fromkeys(rest, 1.5)
    with Quiet(cores.clock) as here:
        assert here.settle() == 1.0
        assert os.sched_getaffinity(0) == os.sched_getaffinity(another.native_id) == {first}
        cores.slow[first] = (1 + NEAR) / 2
        assert here.settle() == (1 + NEAR) / 2
        assert os.sched_getaffinity(0) == {first}
        cores.slow[first], cores.slow[rest[0]] = 1.6, 1.01
        assert here.settle() == 1.01
        assert os.sched_getaffinity(0) == os.sched_getaffinity(another.native_id) == {rest[0]}
    assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(another.native_id) == {max(before)}


def test_where_no_core_is_quiet_the_fastest_will_do_but_is_not_called_quiet():
    cores = Cores()
    with Quiet(cores.clock) as here:
        cores.slow = dict.fromkeys(cores.slow, 2.0) | {max(cores.slow): 1.5}
        assert here.settle() == 1.5
        assert os.sched_getaffinity(0) == {max(cores.slow)}
        assert not here.is_quiet(1.5)
        assert here.is_quiet(1.0)


def test_cores_come_back_after_a_failure():
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), Quiet(Cores().clock):
        1 / 0
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ZeroDivisionError), Quiet(lambda: 1 / 0):  # in the first look already
        pass
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (1, 16, [list(range(16))]),
        (4, 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 96, [list(range(0, 48, 3)), list(range(48, 96, 3))]),
        (3, 2, [[0, 1], [0], [1]]),
        (1, 0, [[]]),
    ],
)
def test_every_rank_of_a_node_has_cores_of_its_own(monkeypatch, ranks, cores, expected):
    """By hand; the fourth has more ranks than cores, the last no way to tell them."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    for rank, own in enumerate(expected):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert quiet._own(list(range(cores))) == own


def test_looks_at_different_times_are_put_together():
    """By hand: the mean of the two quickest of six, and the middle of three."""
    looks = [{"issued": s, "saved": t} for s, t in ((5.0, 3.0), (2.0, 1.0), (4.0, 2.0))] + [
        {"issued": s} for s in (1.0, 6.0, 3.0)
    ]
    assert paces.together(looks) == {"issued": 1.5, "saved": 2.0}


def test_a_host_is_held_against_what_the_same_clock_shows_on_a_quiet_one():
    issued = paces.IN_A_STEP * 0.0125 / paces.ROW  # as `paces` makes of a clock that shows 12.5 ms
    assert paces.share_of(0.0125, issued) == pytest.approx(1.0)
    assert paces.share_of(0.025, issued) == pytest.approx(1.0 + paces.DISTURBED)
