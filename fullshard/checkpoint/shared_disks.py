"""Which ranks share a disk: all of them, or those of each node. Found by writing files and listing them.

A node here is a group of ranks that see the same directory.
"""

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fullshard.base.errors import FullshardError, attempt
from fullshard.checkpoint import commit, verify
from fullshard.checkpoint.directories import Local, Place, open_place
from fullshard.ranks.agreement import RankAgreement


@dataclass(frozen=True)
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

    def share(self, rank: int) -> tuple[int, int]:
        """This rank's place among those of its node, and their number."""
        same = [r for r, node in enumerate(self.of_rank) if node == self.of_rank[rank]]
        return same.index(rank), len(same)

    @property
    def of_file(self) -> list[int | None]:
        """For each rank's file the node whose disk holds it; None where all ranks share a disk."""
        return [None if self.count == 1 else node for node in self.of_rank]


def find_nodes(checkpoint_dir: Place, ranks: RankAgreement) -> Nodes:
    """Write one file per rank and see which ranks' files appear. Creates the directory. Collective."""
    rank, world = ranks.rank, ranks.world
    if not isinstance(checkpoint_dir, Local) or world == 1:
        return Nodes((0,) * world, rank == 0)
    nonce = ranks.decide(commit.new_nonce)
    prefix = f"{commit.PROBE}{nonce}-"
    ranks.gather_results(lambda: _touch(checkpoint_dir, f"{prefix}{rank}"))
    visible = [n for n in checkpoint_dir.files() if n.startswith(prefix)]
    # Every rank sees its own file, so what a group of ranks sees alike is their files at least; if it is as many, no others.
    seen = ranks.gather([_digest(visible), len(visible)])
    checkpoint_dir.remove_file(f"{prefix}{rank}")
    groups = Counter(digest for digest, _ in seen)
    if any(groups[digest] != files for digest, files in seen):
        raise FullshardError(
            f"{checkpoint_dir} is neither one disk that all ranks see nor one for each node; use a shared directory"
        )
    return _nodes([digest for digest, _ in seen], rank)


def _digest(names: Iterable[str]) -> str:
    """Of the names in a directory: what ranks compare, in place of listings that grow with their number."""
    return hashlib.sha256("/".join(sorted(names)).encode()).hexdigest()


def _nodes(views: list[str], rank: int) -> Nodes:
    """Ranks with equal views are a node. Nodes are numbered by their first ranks."""
    first = {view: r for r, view in reversed(list(enumerate(views)))}
    number = {view: i for i, view in enumerate(sorted(first, key=first.__getitem__))}
    return Nodes(tuple(number[view] for view in views), first[views[rank]] == rank)


def _touch(directory: Local, name: str) -> None:
    try:
        os.makedirs(directory.path, exist_ok=True)
        (directory.path / name).touch()
    except OSError as error:
        raise FullshardError(f"cannot write to {directory}: {error.strerror}") from None


def find_nodes_by_listing(place: Place, ranks: RankAgreement) -> Nodes:
    """Group ranks by the files that they see, without writing. Collective."""
    return _nodes(ranks.gather(_digest(place.files())), ranks.rank)


@dataclass(frozen=True)
class Listings:
    """The names of the checkpoints that each node sees, and the node's machine."""

    hosts: list[str]
    seen: list[list[str]]

    def names(self) -> list[str]:
        """All names, newest step first."""
        return sorted({n for names in self.seen for n in names}, key=lambda n: commit.step_of(n) or 0, reverse=True)

    def lacking(self, name: str) -> list[str]:
        """The machines that do not have a checkpoint of this name."""
        return [host for host, names in zip(self.hosts, self.seen, strict=True) if name not in names]


def list_on_nodes(checkpoint_dir: Place, ranks: RankAgreement, nodes: Nodes) -> Listings:
    """What the first rank of each node sees. Collective."""
    own = [socket.gethostname(), commit.committed(checkpoint_dir)] if nodes.is_leader else None
    found = [told for told in ranks.gather(own) if told is not None]
    return Listings([host for host, _ in found], [names for _, names in found])


# -- checkpoints that all ranks can read ----------------------------------------------------------------------


def find_on_all_ranks(where: str | Path, ranks: RankAgreement) -> Place:
    """The checkpoint at `where`, or the newest there that every rank sees. Without a shared disk, nodes may differ in
    their newest one. Collective."""
    place = open_place(where)
    if all(ranks.gather(commit.is_checkpoint(place))):
        return place
    checkpoint_dir = commit.find_checkpoint_dir(where)
    seen = ranks.gather(commit.committed(checkpoint_dir))
    common = [n for n in seen[0] if all(n in names for names in seen)]
    if not common:
        raise FullshardError(f"{where} is neither a checkpoint nor a directory of checkpoints")
    return checkpoint_dir.child(common[-1])


def find_damage(place: Place, ranks: RankAgreement, nodes: Nodes, *, contents: bool = True) -> list[str]:
    """Everything that is wrong with a checkpoint, a sentence each: see `verify.problems`. The ranks of a node share the reading.
    Collective."""
    worked, found = attempt(lambda: verify.problems(place, nodes.share(ranks.rank), contents=contents))
    return [p for of_rank in ranks.gather(found if worked else found[:1]) for p in of_rank]


def find_whole(where: str | Path | Place, ranks: RankAgreement, *, verified: bool) -> Place:
    """The checkpoint at `where` that a state is to be filled from. Raises unless every byte of it is right; `verified`: the
    caller has compared them already. Collective."""
    place = where if isinstance(where, Place) else find_on_all_ranks(where, ranks)
    if not verified and (damage := find_damage(place, ranks, find_nodes_by_listing(place, ranks))):
        raise FullshardError(f"{damage[0]}; use another checkpoint")
    return place
