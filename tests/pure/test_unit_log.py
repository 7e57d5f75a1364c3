"""Which rank has skipped a unit, from each rank's own order of them: lists written by hand."""

import pytest

from fullshard.on_torch.ranks.unit_log import END, PlaceLog, UnitLog, explain, first_difference

E, A, B, C, H = range(5)
NAMES = ["embed", "a", "b", "c", "head", END]


def order(*units: int, backward: tuple[int, ...] = ()) -> list[int]:
    found = PlaceLog()
    for unit in units:
        found.come(unit, backward=False)
    for unit in backward:
        found.come(unit, backward=True)
    return found.published()


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ([order(E, A, B), order(E, B, C)], "rank 1 skipped unit a in forward, and went on to unit b, where rank 0"),
        ([order(E, A, C), order(E, A, B), order(E, A)], "rank 0 skipped unit b in forward, and went on to unit c, where rank 1"),
        ([order(E, A, B, C, H), order(E, A, B, C, 5)], "rank 1 skipped unit head in forward, and went on to the end"),
        ([order(E, A, B, C), order(E, A, B, backward=(B,))], "rank 1 skipped unit c in forward, and went on to unit b"),
        (
            [order(E, backward=(H, C, B)), order(E, backward=(H, C, A))],
            "rank 1 skipped unit b in backward, and went on",
        ),
    ],
)
def test_the_first_difference_is_named(orders, said):
    assert said in explain(first_difference(dict(enumerate(orders))), NAMES)


def test_ranks_that_are_only_behind_have_skipped_nothing():
    assert first_difference({0: order(E, A, B), 1: order(E), 2: order(E, A)}) is None


def test_forwards_without_collectives_are_a_ranks_own_affair():
    log = UnitLog()
    end = log.add(["a"]) + 1
    for _ in range(2):
        log.end(end)
    log.issue(0, backward=False)
    for _ in range(2):
        log.end(end)
    assert log.published() == (0, [0, 0, 2 * end], [0, 2 * end])


def test_a_unit_that_is_left_out_while_it_is_gathered_is_no_rank_s_fault():
    """Rank 1 used it once more, which took no collective."""
    log = UnitLog()
    log.add(NAMES[:-1])
    assert log.explain({0: (0, order(E, A), order(E, A)), 1: (0, order(E, A), order(E, E, A))}) is None


def test_the_rank_that_skips_is_told_by_uses_where_gathers_are_ahead():
    """Rank 1 has no backward of b, whose gather was issued ahead."""
    log = UnitLog()
    log.add(NAMES[:-1])
    issued = {0: order(backward=(H, C, B, A)), 1: order(backward=(H, C, B, C))}
    used = {0: order(backward=(H, C, B)), 1: order(backward=(H, C, A))}
    said = log.explain({rank: (0, issued[rank], used[rank]) for rank in (0, 1)})
    assert "rank 1 skipped unit b in backward, and went on to unit a" in said


def test_uses_that_are_forgotten_are_not_compared():
    """Rank 1 has kept less of the same order."""
    whole, count = order(E, A, B, C), 3
    assert first_difference({0: whole, 1: [count, *whole[1 + count :]]}) is None
    assert first_difference({0: whole, 1: [count, 2 * H]}) == {0: 2 * C, 1: 2 * H}


def test_a_step_that_failed_is_not_compared():
    log = UnitLog()
    log.add(NAMES[:-1])
    log.issue(E, backward=False)
    log.fail()
    assert log.published() == (0, [0, 2 * E], [0])
    log.issue(A, backward=False)
    assert log.published() == (1, [0, 2 * A], [0])
    before, now = (0, order(E, B), order(E, B)), (1, order(E), order(E))
    assert log.explain({0: now, 1: before}) is None
    assert log.explain({0: now, 1: (1, order(A), order(A))}) is not None
