"""Fills a state from a checkpoint whose checksums are compared: before that, or with the bytes that the state is filled with.

A large checkpoint takes as long to read as to load. Whoever can do with an older one, if a state is half filled when damage is
found, reads it once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from fullshard.base.errors import FullshardError, attempt, unwrap
from fullshard.checkpoint.directories import Place, ReadPiece
from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.reader import Checkpoint
from fullshard.checkpoint.shared_disks import find_nodes_by_listing, find_whole
from fullshard.checkpoint.verify import FileChecksum, checksum_problems, share_of
from fullshard.ranks.agreement import RankAgreement

Verify = Literal["first", "meanwhile", "no"]


class DamagedCheckpointError(FullshardError):
    """A checkpoint was found damaged while a state was filled from it: the state is worth nothing until it is filled again."""


class VerifyingCheckpoint(Checkpoint):
    """Computes the checksums of a share of the files, if any, from what is read of them in the files' order. What is not read, or
    out of order, it reads itself."""

    def __init__(self, place: Place, share: tuple[int, int] | None):
        super().__init__(place)
        own = share_of(self.manifest, place.files(), share) if share else []
        self.own = {n: FileChecksum(place, n, self.manifest.files[n].nbytes) for n in own}

    def read_pieces(self, file: str, pieces: Sequence[ReadPiece]) -> None:
        super().read_pieces(file, pieces)
        if file in self.own:
            for start, data in pieces:
                self.own[file].add(start, data)

    def problems(self) -> list[str]:
        return checksum_problems(self.manifest, self.own.values())


def fill_from(where: str | Path | Place, ranks: RankAgreement, verify: Verify, fill: Callable[[Checkpoint], None]) -> Manifest:
    """Call `fill` with the checkpoint at `where`; return its manifest. Collective.

    Damage raises on all ranks: by default before `fill` is called. With `meanwhile` it raises a DamagedCheckpointError, also
    where `fill` raised because of it. With `no` the caller has compared the checksums.
    """
    place, opened = find_whole(where, ranks, verified=verify != "first"), list[VerifyingCheckpoint]()
    share = find_nodes_by_listing(place, ranks).share(ranks.rank) if verify == "meanwhile" else None
    ranks.gather_results(lambda: opened.append(VerifyingCheckpoint(place, share)))
    filled, why = attempt(lambda: fill(opened[0]))
    checked, wrong = attempt(opened[0].problems)
    outcomes = ranks.gather([filled, None if filled else why, wrong if checked else wrong[:1]])
    if damage := [sentence for _, _, found in outcomes for sentence in found]:
        raise DamagedCheckpointError(damage[0])
    unwrap([outcome[:2] for outcome in outcomes])
    return opened[0].manifest
