"""Seconds of a collective on a cluster: an alpha–beta model per link level.

A collective takes its start, its hops, and its bytes at the rate of the slowest link on the way. Inside a node every device
has its own link. Between nodes a group has as many rings as it has ranks on a node, each through its own rank's adapter. So
the ranks of a node add up their shares of the network.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from fullshard.cluster.hardware import Link, check_one_of
from fullshard.cluster.measured import CollectiveKind, MeasuredCollective
from fullshard.cluster.topology import Cluster, ClusterError
from fullshard.plan.plan import Mesh

KINDS: tuple[str, ...] = get_args(CollectiveKind)


@dataclass(frozen=True)
class Spread:
    """How a group is spread over nodes. `fewest`: ranks on the node that has the fewest of them."""

    ranks: int
    nodes: int
    fewest: int


def axis(mesh: Mesh, name: str) -> tuple[int, int]:
    """(ranks, stride) of the groups along a mesh axis. `data` is replicate and shard together."""
    groups = {
        "tensor": (mesh.tensor, 1),
        "shard": (mesh.shard, mesh.tensor),
        "replicate": (mesh.replicate, mesh.shard * mesh.tensor),
        "data": (mesh.data, mesh.tensor),
    }
    check_one_of("axis", name, tuple(groups))
    return groups[name]


def collective_seconds(kind: CollectiveKind, nbytes: float, ranks: int, cluster: Cluster, *, stride: int = 1) -> float:
    """Seconds of one collective over groups of `ranks` ranks that lie `stride` apart, all groups at once.

    `nbytes` is the size of the whole tensor: what an all-gather leaves on every rank, what a reduce-scatter
    starts from on every rank.
    """
    check_one_of("collective", kind, KINDS)
    if ranks == 1:
        return 0.0
    spread = spread_of(ranks, stride, cluster)
    measured = _measured(kind, spread, cluster)
    if measured is not None:
        return _timed(measured, nbytes, spread, cluster)
    if kind == "all_to_all":
        return _latencies(kind, spread, cluster)["pairs"] + _exchange(nbytes, spread, cluster)
    return min(
        latency + wire(algorithm, kind, nbytes, ranks) / bus_bandwidth(spread, cluster)
        for algorithm, latency in _latencies(kind, spread, cluster).items()
    )


def _exchange(nbytes: float, spread: Spread, cluster: Cluster) -> float:
    """Seconds of the wire of an all-to-all: every rank sends an equal part to each other rank, those on other nodes through its
    own adapter."""
    near = nbytes * (spread.fewest - 1) / spread.ranks
    far = nbytes * (spread.ranks - spread.fewest) / spread.ranks
    inside = near / _inner_bandwidth(spread.fewest, cluster) if near else 0.0
    return max(inside, far / (cluster.network.bandwidth * cluster.network.efficiency) if far else 0.0)


def collective_source(kind: CollectiveKind, ranks: int, cluster: Cluster, *, stride: int = 1) -> str:
    """`measured` if `collective_seconds` uses a measured collective, else `nominal`."""
    spread = spread_of(ranks, stride, cluster)
    return "nominal" if _measured(kind, spread, cluster) is None else "measured"


def wire(algorithm: str, kind: str, nbytes: float, ranks: int) -> float:
    """Bytes that the busiest link carries: NCCL's bus bytes for a ring, twice the tensor for a binary tree."""
    if algorithm == "tree":
        return 2 * nbytes
    share = (ranks - 1) / ranks
    factors = {"all_gather": share, "reduce_scatter": share, "all_to_all": share, "all_reduce": 2 * share, "broadcast": 1.0}
    return nbytes * factors[kind]


def bus_bandwidth(spread: Spread, cluster: Cluster) -> float:
    """Bytes a second of the slowest link level that a group's rings cross."""
    levels = []
    if spread.ranks > spread.nodes:  # some node has two of them
        levels.append(_inner_bandwidth(-(-spread.ranks // spread.nodes), cluster))
    if spread.nodes > 1:
        levels.append(spread.fewest * cluster.network.bandwidth * cluster.network.efficiency)
    return min(levels)


def _inner_bandwidth(ranks: int, cluster: Cluster) -> float:
    link = cluster.node.link
    share = (ranks - 1) / (cluster.node.devices - 1) if link.topology == "mesh" else 1.0
    return link.bandwidth * link.efficiency * share


# -- latency ------------------------------------------------------------------------------------------


def _latencies(kind: str, spread: Spread, cluster: Cluster) -> dict[str, float]:
    """Seconds of start and hops, by algorithm. Only all-reduce and broadcast have trees."""
    inner, outer = cluster.node.link, cluster.network
    start = max(inner.start, outer.start if spread.nodes > 1 else 0.0)
    return {
        name: start + inside * inner.latency + between * outer.latency
        for name, (inside, between) in _hops(kind, spread, inner).items()
    }


def _hops(kind: str, spread: Spread, link: Link) -> dict[str, tuple[float, int]]:
    """By algorithm: (hops inside nodes, hops between nodes) that one piece travels."""
    if kind == "all_to_all":  # a message to each rank, all at once
        return {"pairs": (1, 1 if spread.nodes > 1 else 0)}
    passes = 2 if kind == "all_reduce" else 1
    between = spread.nodes - 1
    hops = {"ring": (passes * _ring_hops(spread.ranks - spread.nodes, link), passes * between)}
    if kind in ("all_reduce", "broadcast"):
        on_node = -(-spread.ranks // spread.nodes)
        hops["tree"] = (passes * math.ceil(math.log2(on_node)), passes * math.ceil(math.log2(spread.nodes)))
    return hops


def _ring_hops(steps: int, link: Link) -> float:
    """Hops of a ring. A torus has a ring along each axis, so a piece travels the sum of the axes' lengths, not their product."""
    axes = {"torus2": 2, "torus3": 3}.get(link.topology, 1)
    return axes * ((steps + 1) ** (1 / axes) - 1)


# -- where a group lies -------------------------------------------------------------------------------


def spread_of(ranks: int, stride: int, cluster: Cluster) -> Spread:
    """The spread of the slowest group: the step waits for it."""
    if ranks < 1 or stride < 1 or cluster.devices % (ranks * stride):
        raise ClusterError(
            f"groups of {ranks} ranks {stride} apart do not tile {cluster.devices} devices; "
            f"write a count and a stride whose product divides {cluster.devices}"
        )
    return _spread(ranks, stride, cluster.devices, cluster.node.devices)


@lru_cache(maxsize=4096)
def _spread(ranks: int, stride: int, devices: int, node: int) -> Spread:
    found = {
        _spread_of_group(range(first, first + ranks * stride, stride), node)
        for block in range(0, devices, ranks * stride)
        for first in range(block, block + stride)
    }
    return max(found, key=lambda s: (s.nodes > 1, -s.fewest, s.nodes))


def _spread_of_group(group: range, node: int) -> Spread:
    counts: dict[int, int] = {}
    for rank in group:
        counts[rank // node] = counts.get(rank // node, 0) + 1
    return Spread(len(group), len(counts), min(counts.values()))


# -- measured -----------------------------------------------------------------------------------------


def _measured(kind: str, spread: Spread, cluster: Cluster) -> MeasuredCollective | None:
    """The measured collective of this kind over the same link levels with as many ranks a node; the nearest in ranks if there
    are several, None if there is none."""
    known = cluster.measured.collectives if cluster.measured else ()
    fitting = [c for c in known if c.kind == kind and _comparable(c, spread, cluster)]
    return min(fitting, key=lambda c: abs(c.ranks - spread.ranks), default=None)


def _comparable(c: MeasuredCollective, spread: Spread, cluster: Cluster) -> bool:
    if c.nodes == 1 or spread.nodes == 1:
        mesh = cluster.node.link.topology == "mesh"  # fewer ranks use fewer wires
        return c.nodes == spread.nodes and (c.ranks == spread.ranks or not mesh)
    return c.ranks // c.nodes == spread.fewest and spread.ranks == spread.fewest * spread.nodes


def _timed(c: MeasuredCollective, nbytes: float, spread: Spread, cluster: Cluster) -> float:
    """Seconds by a measured latency and bandwidth. For other ranks the latency is scaled like the nominal one."""
    how = "pairs" if c.kind == "all_to_all" else "ring"
    there = _latencies(c.kind, Spread(c.ranks, c.nodes, c.ranks // c.nodes), cluster)[how]
    here = _latencies(c.kind, spread, cluster)[how]
    return c.latency * here / there + wire("ring", c.kind, nbytes, spread.ranks) / c.bandwidth
