"""Who shares a disk: all ranks one, or each node one of its own. Found out by leaving files and looking."""

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
    """How ranks share disks: `of_rank` numbers the disk that each sees; `leads`: this rank is the first at its own."""

    of_rank: tuple[int, ...]
    leads: bool

    @property
    def count(self) -> int:
        return max(self.of_rank) + 1

    @property
    def leaders(self) -> list[int]:
        """The first rank at each disk."""
        return [self.of_rank.index(node) for node in range(self.count)]

    @property
    def of_files(self) -> list[int | None]:
        """The disk that each rank's file lies on; None where all share one."""
        return [None if self.count == 1 else node for node in self.of_rank]


def find_nodes(shelf: Place, group: dist.ProcessGroup) -> Nodes:
    """Every rank leaves a file and looks whose files it sees. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if not isinstance(shelf, Local) or world == 1:
        return Nodes((0,) * world, rank == 0)
    nonce = decide(group, commit.new_nonce)
    prefix = f"{commit.PROBE}{nonce}-"
    gather_results(group, lambda: _leave(shelf, f"{prefix}{rank}"))
    seen = gather(group, tuple(sorted(int(n.removeprefix(prefix)) for n in shelf.files() if n.startswith(prefix))))
    shelf.remove_file(f"{prefix}{rank}")
    leaders = sorted({ranks[0] for ranks in seen})
    if any(seen[other] != ranks for ranks in seen for other in ranks):
        raise FullshardError(f"{shelf} is neither one disk that all ranks see nor one for each node; use a shared directory")
    return Nodes(tuple(leaders.index(ranks[0]) for ranks in seen), seen[rank][0] == rank)


def _leave(shelf: Local, name: str) -> None:
    try:
        os.makedirs(shelf.path, exist_ok=True)
        (shelf.path / name).touch()
    except OSError as error:
        raise FullshardError(f"cannot write to {shelf}: {error.strerror}") from None


def find_nodes_read(place: Place, group: dist.ProcessGroup) -> Nodes:
    """Ranks by the files that they see, for reading only."""
    seen = gather(group, tuple(sorted(place.files())))
    kinds = sorted(set(seen), key=seen.index)
    return Nodes(tuple(kinds.index(s) for s in seen), kinds.index(seen[dist.get_rank()]) == dist.get_rank())


def once_a_node(plans: Sequence[SavePlan], nodes: Nodes) -> list[SavePlan]:
    """Leave out of each plan what another rank of the same node writes; the rank with the least to do takes it."""
    holders: dict[Any, list[tuple[int, int]]] = {}  # rank, bytes
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
