"""Counted, not timed: bytes at rest and bytes on the wire, against formulas done by hand."""

import pytest

from tests.cpu import parity, traffic

# name -> shape of every parameter of parity.SIZE, written out: the oracle does not ask the code under test.
BLOCK = [(24, 24), (12, 24), (12, 24), (24, 24), (42, 24), (42, 24), (24, 42), (24,), (24,)]
UNITS = {"embed": [(50, 24)], "block0": BLOCK, "block1": BLOCK, "block2": BLOCK, "head": [(24,), (50, 24)]}


@pytest.fixture(scope="module")
def traffic_of(ranks):
    """`traffic_of(2, "zero3", …)`: each rank's collectives of a step and bytes at rest. Several tests look at the same ones."""
    known: dict[str, list] = {}

    def call(world: int, *arguments, **options) -> list:
        key = repr((world, arguments, options))
        if key not in known:
            known[key] = ranks(world).run(traffic.step_traffic, *arguments, **options)
        return known[key]

    return call


def rest(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape[1:]:
        n *= size
    return n


def padded(unit: list[tuple[int, ...]], ranks: int) -> int:
    """Elements of a unit once every dim 0 is rounded up to a multiple of the ranks."""
    return sum(-(-shape[0] // ranks) * ranks * rest(shape) for shape in unit)


def held(ranks: int, rank: int) -> int:
    """Elements on one rank: dim 0 in ceil-divided chunks, the last ones shorter or empty."""
    total = 0
    for shape in [s for unit in UNITS.values() for s in unit]:
        chunk = -(-shape[0] // ranks)
        total += max(0, min(chunk, shape[0] - rank * chunk)) * rest(shape)
    return total


def whole(ranks: int = 1) -> int:
    return sum(padded(u, ranks) for u in UNITS.values())


def total(collectives: list, kind: str, ranks: int | None = None) -> int:
    # The step's own two all-reduces (token count; loss, norm and what ranks compare) are of doubles and tiny.
    return sum(n for k, n, r in collectives if k == kind and ranks in (None, r) and n > 48)


@pytest.mark.quick(4)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_bytes_at_rest(traffic_of, world, strategy):
    for rank, (_, found) in enumerate(traffic_of(world, strategy, {"devices": world})):
        elements = whole() if strategy == "ddp" else held(world, rank)
        assert found == {"params": 4 * elements, "optimizer": 8 * elements, "gradients": 0, "buffers": 0}


def test_bytes_at_rest_hybrid_and_mixed(traffic_of):
    for rank, (_, found) in enumerate(traffic_of(4, "hybrid", {"replicate": 2, "shard": 2})):
        assert found["params"] == 4 * held(2, rank % 2)
    embed = 50 * 24
    for rank, (_, found) in enumerate(traffic_of(4, "mixed", {"devices": 4, "replicate": ["embed"]})):
        share = max(0, min(13, 50 - 13 * rank)) * 24
        assert found["params"] == 4 * (held(4, rank) - share + embed)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("compute", "item"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("world", [2, 4])
def test_zero3_gathers_twice_and_reduces_once(traffic_of, world, compute, item):
    found, _ = traffic_of(world, "zero3", {"devices": world}, compute=compute)[0]
    assert total(found, "gather") == 2 * item * whole(world)
    assert total(found, "reduce") == 4 * whole(world)
    assert total(found, "all_reduce") == 0
    assert sum(k == "gather" for k, _, _ in found) == 2 * len(UNITS)  # one collective a unit and pass


@pytest.mark.quick(1)
@pytest.mark.parametrize("world", [2, 4])
def test_zero2_gathers_once_and_reduces_once(traffic_of, world):
    found, _ = traffic_of(world, "zero2", {"devices": world})[0]
    assert total(found, "gather") == 4 * whole(world)
    assert total(found, "reduce") == 4 * whole(world)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "gathers", "reduces"), [("zero3", 8, 4), ("zero2", 4, 4), ("zero1", 1, 1)])
def test_accumulating_four(traffic_of, strategy, gathers, reduces):
    found, _ = traffic_of(2, strategy, {"devices": 2}, accumulate=4)[0]
    assert total(found, "gather") == gathers * 4 * whole(2)
    assert total(found, "reduce") == reduces * 4 * whole(2)


def test_deferred_sync_reduces_once(traffic_of):
    found, _ = traffic_of(2, "zero3", {"devices": 2}, accumulate=4, sync="last")[0]
    assert total(found, "gather") == 8 * 4 * whole(2)
    assert total(found, "reduce") == 4 * whole(2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("world", [2, 4])
def test_ddp_all_reduces_once(traffic_of, world):
    found, _ = traffic_of(world, "ddp", {"devices": world})[0]
    assert total(found, "gather") == total(found, "reduce") == 0
    assert total(found, "all_reduce") == 4 * whole()


def test_hybrid_adds_the_all_reduce_of_a_shard(traffic_of):
    found, _ = traffic_of(4, "hybrid", {"replicate": 2, "shard": 2})[0]
    assert total(found, "gather", 2) == total(found, "gather") == 2 * 4 * whole(2)
    assert total(found, "reduce", 2) == total(found, "reduce") == 4 * whole(2)
    assert total(found, "all_reduce") == 4 * whole(2) // 2


def test_hpz_gathers_over_all_then_over_two(traffic_of):
    found, _ = traffic_of(4, "hpz", {"devices": 4, "reshard": 2})[0]
    assert total(found, "gather", 4) == 4 * whole(4)
    assert total(found, "gather", 2) == 4 * whole(4)  # the two ranks hold the padded halves between them
    assert total(found, "reduce", 4) == 4 * whole(4)


def test_mixed_moves_only_the_sharded_units(traffic_of):
    found, _ = traffic_of(4, "mixed", {"devices": 4, "replicate": ["embed"]})[0]
    sharded = whole(4) - padded(UNITS["embed"], 4)
    assert total(found, "gather") == 2 * 4 * sharded
    assert total(found, "all_reduce") == 4 * 50 * 24


def test_frozen_parameters_are_gathered_but_not_reduced(traffic_of):
    found, held_bytes = traffic_of(2, "zero3", {"devices": 2}, kind="lora")[0]
    lora = [(4, 24), (24, 4), (4, 24), (12, 4), (4, 42), (24, 4)]  # A and B of q, v and down
    assert total(found, "reduce") == 4 * 3 * padded(lora, 2)
    assert held_bytes["optimizer"] == 8 * 3 * sum(-(-s[0] // 2) * rest(s) for s in lora)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefetch_depth_is_how_many_units_are_gathered_ahead(ranks, depth):
    forward, backward = ranks(2).run(traffic.prefetch_order, depth)[0]
    # Before the first block computes: the embedding, the block, and with an explicit depth d the d units after it.
    ahead = 0 if depth == 1 else depth
    assert forward[: forward.index("forward 0")] == ["gather"] * min(2 + ahead, len(UNITS))
    # Before the last block's backward: the head, the block, and the d units before it.
    assert backward[: backward.index("backward 2")].count("gather") == min(2 + depth, len(UNITS))


def test_sizes_written_above_are_the_models():
    assert sum(p.numel() for p in parity.build("plain").parameters()) == whole()
