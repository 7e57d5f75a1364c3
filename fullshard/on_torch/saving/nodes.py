"""Which ranks share a disk: all of them, or those of each node. Found by writing files and listing them.

A node here is a group of ranks that see the same directory.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import SavePlan

from fullshard.checkpoint import commit
from fullshard.checkpoint.place import Local, Place
from fullshard.errors import FullshardError
from fullshard.on_torch.agree import decide, gather, gather_results


@dataclasses.dataclass(frozen=True)
class Nodes:
    """`of_rank[r]` is the node of rank r. `is_leader`: this rank is the first of its node."""

    of_rank: tuple[int, ...]
    is_leader: bool

    @property
    def count(self) -> int:
        return max(self.of_rank) + 1

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [self.of_rank.index(node) for node in range(self.count)]

    @property
    def of_file(self) -> list[int | None]:
        """For each rank's file the node whose disk holds it; None where all ranks share a disk."""
        return [None if self.count == 1 else node for node in self.of_rank]


def find_nodes(checkpoint_dir: Place, group: dist.ProcessGroup) -> Nodes:
    """Write one file per rank and see which ranks' files appear. Creates the directory. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if not isinstance(checkpoint_dir, Local) or world == 1:
        return Nodes((0,) * world, rank == 0)
    nonce = decide(group, commit.new_nonce)
    prefix = f"{commit.PROBE}{nonce}-"
    gather_results(group, lambda: _touch(checkpoint_dir, f"{prefix}{rank}"))
    visible = sorted(int(n.removeprefix(prefix)) for n in checkpoint_dir.files() if n.startswith(prefix))
    seen = gather(group, tuple(visible))
    checkpoint_dir.remove_file(f"{prefix}{rank}")
    leaders = sorted({ranks[0] for ranks in seen})
    if any(seen[other] != ranks for ranks in seen for other in ranks):
        raise FullshardError(
            f"{checkpoint_dir} is neither one disk that all ranks see nor one for each node; use a shared directory"
        )
    return Nodes(tuple(leaders.index(ranks[0]) for ranks in seen), seen[rank][0] == rank)


def _touch(directory: Local, name: str) -> None:
    try:
        os.makedirs(directory.path, exist_ok=True)
        (directory.path / name).touch()
    except OSError as error:
        raise FullshardError(f"cannot write to {directory}: {error.strerror}") from None


def find_nodes_by_listing(place: Place, group: dist.ProcessGroup) -> Nodes:
    """Group ranks by the files that they see, without writing. Collective."""
    seen = gather(group, tuple(sorted(place.files())))
    listings = sorted(set(seen), key=seen.index)
    rank = dist.get_rank()
    return Nodes(tuple(listings.index(s) for s in seen), seen.index(seen[rank]) == rank)


def once_per_node(plans: Sequence[SavePlan], nodes: Nodes) -> list[SavePlan]:
    """Save plans in which each node writes each of its items once; the rank with the fewest bytes so far takes an item."""
    holders: dict[Any, list[tuple[int, int]]] = {}  # (node, item): rank, bytes
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault((nodes.of_rank[rank], item.index), []).append((rank, item.tensor_storage_size() or 0))
    load = [0] * len(plans)
    kept: list[set[Any]] = [set() for _ in plans]
    for (_, index), ranks in holders.items():
        taker, nbytes = min(ranks, key=lambda r: load[r[0]])
        kept[taker].add(index)
        load[taker] += nbytes
    return [dataclasses.replace(p, items=[i for i in p.items if i.index in k]) for p, k in zip(plans, kept, strict=True)]
