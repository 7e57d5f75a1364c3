"""Seconds of collectives: closed forms worked out by hand, NCCL's published numbers, and laws any model must obey."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.cluster.hardware import Link
from fullshard.cluster.measured import MeasuredCollective
from fullshard.cluster.topology import Cluster, ClusterError, Measured
from fullshard.plan.plan import Mesh
from fullshard.planner.time.collectives import KINDS, Spread, axis, collective_seconds, collective_source, spread_of

GiB = 1 << 30


def bench(devices: int, *, inner: Link | None = None, outer: Link | None = None) -> Cluster:
    """Nodes of four with round numbers: 100 GB/s and 1 µs inside, 10 GB/s a device and 10 µs between."""
    base = Cluster.load(f"{devices}xh100")
    inner = inner or Link("in", 100e9, 1e-6, 1.0, 5e-6)
    outer = outer or Link("out", 10e9, 10e-6, 1.0, 5e-6)
    return dataclasses.replace(base, node=dataclasses.replace(base.node, devices=4, link=inner), network=outer)


def bus(kind: str, nbytes: float, ranks: int, cluster: Cluster, stride: int = 1) -> float:
    """GB/s as nccl-tests reports it: algorithm bandwidth times 2(n−1)/n, (n−1)/n or 1."""
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1}.get(kind, (ranks - 1) / ranks)
    return nbytes / collective_seconds(kind, nbytes, ranks, cluster, stride=stride) * factor / 1e9


# -- by hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ranks", "stride", "devices", "expected"),
    [
        # one node: 3 hops of 1 µs, three quarters of 400 MB at 100 GB/s = 3 ms
        ("all_gather", 4, 1, 4, 5e-6 + 3e-6 + 3e-3),
        ("reduce_scatter", 4, 1, 8, 5e-6 + 3e-6 + 3e-3),
        ("all_reduce", 4, 1, 4, 5e-6 + 6e-6 + 6e-3),
        # four nodes: 15 hops, 3 of them between nodes; four adapters of 10 GB/s carry 15/16 of it at 40 GB/s
        ("all_gather", 16, 1, 16, 5e-6 + 12e-6 + 30e-6 + 375e6 / 40e9),
        ("all_reduce", 16, 1, 16, 5e-6 + 24e-6 + 60e-6 + 750e6 / 40e9),
        # one rank a node: one adapter, no inner link
        ("all_gather", 4, 4, 16, 5e-6 + 30e-6 + 300e6 / 10e9),
        ("all_reduce", 4, 4, 16, 5e-6 + 60e-6 + 600e6 / 10e9),
        # two ranks a node: two adapters
        ("all_gather", 8, 2, 16, 5e-6 + 4e-6 + 30e-6 + 350e6 / 20e9),
        # a last node with two: its two adapters are the narrowest place
        ("all_gather", 6, 1, 6, 5e-6 + 4e-6 + 10e-6 + 400e6 * 5 / 6 / 20e9),
    ],
)
def test_closed_forms(kind, ranks, stride, devices, expected):
    assert collective_seconds(kind, 400e6, ranks, bench(devices), stride=stride) == pytest.approx(expected, rel=1e-9)


def test_a_small_all_reduce_takes_the_tree():
    # up and down two levels inside and two between: 2 × (2 × 1 + 2 × 10) µs, and nothing to carry
    assert collective_seconds("all_reduce", 1, 16, bench(16)) == pytest.approx(5e-6 + 44e-6, rel=1e-3)
    assert collective_seconds("all_gather", 1, 16, bench(16)) == pytest.approx(5e-6 + 42e-6, rel=1e-3)  # a ring


def test_a_mesh_gives_a_small_group_only_its_own_wires():
    mesh = bench(4, inner=Link("in", 90e9, 1e-6, 1.0, 5e-6, "mesh"))  # three wires of 30 GB/s
    assert bus("all_gather", 100 * GiB, 4, mesh) == pytest.approx(90, rel=1e-3)
    assert bus("all_gather", 100 * GiB, 2, mesh) == pytest.approx(30, rel=1e-3)


def test_one_rank_needs_no_wire():
    assert collective_seconds("all_reduce", GiB, 1, bench(8)) == 0


def test_how_groups_lie_over_nodes():
    cluster = bench(16)
    assert spread_of(4, 1, cluster) == Spread(4, 1, 4)
    assert spread_of(8, 1, cluster) == Spread(8, 2, 4)
    assert spread_of(4, 4, cluster) == Spread(4, 4, 1)
    assert spread_of(2, 2, cluster) == Spread(2, 1, 2)
    assert spread_of(3, 1, bench(12)) == Spread(3, 2, 1)  # ranks 3, 4, 5 straddle; ranks 0, 1, 2 do not


def test_the_axes_of_a_mesh():
    mesh = Mesh(replicate=2, shard=4, tensor=8)
    assert [axis(mesh, a) for a in ("tensor", "shard", "replicate", "data")] == [(8, 1), (4, 8), (2, 32), (8, 8)]


# -- published ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "stride", "low", "high"),
    [
        ("8xh100", "all_gather", 8, 1, 340, 370),  # nccl-tests on HGX H100, gigabyte messages, rings
        ("8xa100", "all_reduce", 8, 1, 225, 240),  # nccl-tests issue 175: 232.5; NCCL's tuner caps A100 at 235
        ("16xh100", "all_reduce", 16, 1, 330, 400),  # eight 400 Gb/s adapters a node add up
        ("16xh100", "all_gather", 2, 8, 45, 48),  # nccl-tests issue 290: 46–48 GB/s a 400 Gb/s adapter
        ("24xa100", "all_reduce", 3, 8, 22, 25),  # one 200 Gb/s adapter
    ],
)
def test_bus_bandwidth_of_large_messages(name, kind, ranks, stride, low, high):
    assert low < bus(kind, 4 * GiB, ranks, Cluster.load(name), stride) < high


def test_all_reduce_of_eight_across_sizes():
    """nccl-tests on eight GPUs with 450 GB/s of NVLink each (Mooncake pull request 3484): µs by size."""
    published = {2**15: 18.7, 2**20: 27.8, 2**22: 53.2, 2**24: 121.3, 2**25: 195.4}
    for size, micro in published.items():
        assert collective_seconds("all_reduce", size, 8, Cluster.load("8xh100")) * 1e6 == pytest.approx(micro, rel=0.25)


# -- laws ---------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a100", "h100", "b200", "gb200", "mi300x", "rtx4090", "v5p", "v6e", "cpu"])


@settings(max_examples=60, deadline=None)
@given(NAMES, st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 4), st.floats(1, 1e12), st.floats(1, 10))
def test_more_bytes_never_take_less_time(name, kind, ranks, stride, nbytes, more):
    cluster = Cluster.load(f"{2 ** (ranks + stride)}x{name}")
    first, second = (collective_seconds(kind, n, 2**ranks, cluster, stride=2**stride) for n in (nbytes, nbytes * more))
    assert 0 <= first <= second
    assert second <= first * more * (1 + 1e-9)  # and never out of proportion


@settings(max_examples=60, deadline=None)
@given(NAMES.filter(lambda n: n not in ("mi300x", "gb200")), st.sampled_from(KINDS), st.integers(1, 9), st.floats(1, 1e12))
def test_more_consecutive_ranks_never_take_less_time(name, kind, ranks, nbytes):
    """Where groups and nodes align. On a mesh more ranks have more wires; over racks of 72 a group of 512 may
    have fewer ranks, and so fewer adapters, on its last node than one of 1024."""
    cluster = Cluster.load(f"1024x{name}")
    fewer, more = (collective_seconds(kind, nbytes, 2**r, cluster) for r in (ranks, ranks + 1))
    assert fewer <= more * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(NAMES, st.integers(1, 8), st.floats(1, 1e12))
def test_an_all_reduce_costs_no_more_than_its_two_halves(name, ranks, nbytes):
    cluster = Cluster.load(f"{2**ranks}x{name}")
    whole, *halves = (collective_seconds(k, nbytes, 2**ranks, cluster) for k in ("all_reduce", "reduce_scatter", "all_gather"))
    assert whole <= sum(halves) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.floats(1e6, 1e10), st.floats(1, 4))
def test_a_faster_network_never_takes_more_time(nodes, nbytes, faster):
    slow = bench(4 * 2**nodes)
    quick = dataclasses.replace(slow, network=dataclasses.replace(slow.network, bandwidth=slow.network.bandwidth * faster))
    times = [collective_seconds("all_gather", nbytes, slow.devices, c) for c in (quick, slow)]
    assert times[0] <= times[1]


# -- measured -----------------------------------------------------------------------------------------


def timed(devices: int, *collectives: MeasuredCollective) -> Cluster:
    return dataclasses.replace(bench(devices), measured=Measured("a bench", "bf16", collectives=collectives))


def test_a_measured_collective_is_used_as_it_was_timed():
    cluster = timed(4, MeasuredCollective("all_gather", 4, 1, 30e-6, 75e9))
    assert collective_seconds("all_gather", 400e6, 4, cluster) == pytest.approx(30e-6 + 300e6 / 75e9)
    assert collective_source("all_gather", 4, cluster) == "measured"
    assert collective_source("all_reduce", 4, cluster) == "nominal"


def test_a_measured_collective_serves_other_groups_on_the_same_links_only():
    cluster = timed(16, MeasuredCollective("all_gather", 4, 1, 16e-6, 75e9))
    # two ranks travel one hop, not three: nominally 6 µs in place of 8
    assert collective_seconds("all_gather", 400e6, 2, cluster) == pytest.approx(16e-6 * 6 / 8 + 200e6 / 75e9)
    assert collective_source("all_gather", 8, cluster) == "nominal"  # crosses nodes
    across = timed(16, MeasuredCollective("all_gather", 8, 2, 50e-6, 35e9))
    assert collective_source("all_gather", 16, across) == "measured"  # four ranks a node, as timed
    assert collective_source("all_gather", 4, across, stride=4) == "nominal"  # one rank a node


def test_what_cannot_be_asked():
    with pytest.raises(ClusterError, match="do not tile 8 devices"):
        collective_seconds("all_gather", 1, 3, bench(8))
    with pytest.raises(ClusterError, match="did you mean 'all_gather'"):
        collective_seconds("gather", 1, 2, bench(8))
    with pytest.raises(ClusterError, match="axis must be one of"):
        axis(Mesh(), "shards")
