"""A unit that one rank skips in a later step than the first: the rank and the unit are named, and all ranks end."""

import pytest

from tests.cpu import skips

SKIPPED = "rank 1 skipped unit model.layers.{} in {}, and went on to {}, where rank 0 computes it"
HEAD = "unit head"  # the norm and the head
MIXED = "rank 0 skipped unit model.layers.1 in forward, and went on to unit model.layers.2, where rank 1 computes it"


@pytest.mark.parametrize(
    ("fault", "said", "more"),
    [
        ("skip 1", SKIPPED.format(1, "forward", "unit model.layers.2"), {}),
        ("skip 2", SKIPPED.format(2, "forward", HEAD), {"own": True}),
        ("skip another", MIXED, {}),
        pytest.param("skip another", MIXED, {"own": True}, marks=pytest.mark.full),
        pytest.param("detach", SKIPPED.format(1, "backward", "unit model.layers.0"), {}, marks=pytest.mark.full),
        pytest.param("detach", SKIPPED.format(1, "backward", "unit model.layers.0"), {"own": True}, marks=pytest.mark.full),
        pytest.param("skip 1", SKIPPED.format(1, "forward", "unit model.layers.2"), {"world": 4}, marks=pytest.mark.full),
        pytest.param("skip 2", SKIPPED.format(2, "forward", HEAD), {"strategy": "zero2", "own": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_unit_skipped_later_is_named(fault, said, more):
    found = skips.run(fault, **more)
    assert all(code is not None and code > 0 for code, _ in found), found  # neither hung nor ended by a signal
    assert any(said in text for _, text in found), found
    assert all("nothing was updated" in text for _, text in found if "Error" in text), found
    assert not any("terminate called" in text for _, text in found), found


@pytest.mark.full
def test_a_rank_that_is_killed_has_skipped_nothing():
    (code, text), (killed, _) = skips.run("killed", own=True)
    assert killed == -9
    assert code == 1
    assert "skipped" not in text


def test_looking_for_skips_holds_no_tensor(ranks):
    """A look at the main thread's frames would keep their local tensors: activations, and those whose frees a trace records."""
    assert ranks(2).run(skips.held_after_a_long_computation) == [False, False]
