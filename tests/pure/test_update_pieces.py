"""Pieces of an update: nothing left out, nothing twice, nothing too large."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.base.errors import FullshardError
from fullshard.plan.update_pieces import GRAIN, PIECE, cut, deal


@given(st.integers(1, 40 * PIECE))
def test_pieces_cover_a_shard_in_even_grains(elements):
    pieces = cut(elements)
    assert [i for piece in pieces for i in piece] == [0, *[i for _, i in pieces[:-1] for _ in range(2)], elements]
    sizes = [stop - start for start, stop in pieces]
    assert max(sizes) <= PIECE
    assert len(sizes) == -(-elements // PIECE)
    assert all(start % GRAIN == 0 for start, _ in pieces)
    assert max(sizes) - min(sizes) < 2 * GRAIN


def test_pieces_by_hand():
    assert cut(0) == []
    assert cut(5) == [(0, 5)]
    assert cut(PIECE) == [(0, PIECE)]
    assert cut(PIECE + 1) == [(0, PIECE // 2 + 1024), (PIECE // 2 + 1024, PIECE + 1)]


@given(st.integers(0, 300), st.integers(0, 8))
def test_every_stretch_of_pieces_is_dealt_its_share(count, eighths):
    dealt = deal(count, eighths / 8)
    assert len(dealt) == count
    for start in range(count):
        for stop in (start + 1, start + 7, count):
            stretch = dealt[start:stop]
            assert abs(stretch.count("cpu") - Fraction(eighths, 8) * len(stretch)) <= 1


def test_shares_by_hand():
    assert deal(3, 0) == ["gpu"] * 3
    assert deal(3, 1) == ["cpu"] * 3
    assert deal(6, 0.5) == ["cpu", "gpu"] * 3
    assert deal(8, 0.25) == ["gpu", "cpu", "gpu", "gpu", "gpu", "cpu", "gpu", "gpu"]
    with pytest.raises(FullshardError, match="from 0 to 1"):
        deal(3, 1.5)
