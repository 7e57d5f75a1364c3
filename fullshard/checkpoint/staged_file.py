"""A rank's file of a save, staged: an engine copies its parts into an image in host memory, or reads them from the state.

All that is known here of the state is the file's bytes by range.
"""

from abc import ABC, abstractmethod

import xxhash

from fullshard.base.text import bytes_text
from fullshard.checkpoint.background_writer import Background
from fullshard.checkpoint.directories import Place
from fullshard.checkpoint.file_layout import SaveLayout
from fullshard.checkpoint.manifest import checksum as checksum_of
from fullshard.ranks.agreement import RankAgreement
from fullshard.ranks.local_ranks import ranks_here
from fullshard.storage.memory_limits import host_limit


class StagedFile(ABC):
    """Writes this rank's file of each save.

    `room` is the host memory in bytes that the copies may take; by default each rank's share of what is free. If they do not
    fit on one rank, no rank makes any: the files are written from the state itself, which must not change until then, and
    `in_place_reason` is a sentence that says why. `worker`: a thread that computes checksums.
    """

    shards: SaveLayout  # of the save in flight

    def __init__(self, ranks: RankAgreement, worker: Background, room: int | None):
        self.ranks, self.worker, self.room, self.in_place_reason = ranks, worker, room, ""

    @property
    def in_place(self) -> bool:
        return bool(self.in_place_reason)

    @abstractmethod
    def copied_bytes(self) -> memoryview:
        """The copies, as the file will have them."""

    @abstractmethod
    def check_copies(self) -> None:
        """Raise where the copies hold what must not be saved."""

    @abstractmethod
    def read_state(self, start: int, memory: memoryview) -> None:
        """Fill memory with the file's bytes from `start` on, from the state. Raise where they must not be saved."""

    def find_room(self, held: int) -> None:
        """Decide on all ranks whether copies are made. `held`: bytes that this rank has for copies already. Collective."""
        nbytes = self.shards.layout.nbytes

        def sizes() -> list[int]:  # a sixteenth of the host's memory stays free
            return [nbytes, host_limit() * 15 // 16 // ranks_here() + held if self.room is None else self.room]

        short = [(needed, room) for needed, room in self.ranks.gather_integers(sizes, 2) if needed > room]
        self.in_place_reason = _no_room(*short[0]) if short else ""

    def write(self, directory: Place, checksum: str | None) -> str:
        """Write the file and return its checksum. `checksum`: if the copies have computed it; otherwise it is computed while the
        disk writes."""
        if self.in_place:
            return self._write_in_place(directory)
        self.check_copies()
        image, length = self.copied_bytes(), self.shards.layout.nbytes
        computed = None if checksum else self.worker.submit(lambda: checksum_of(image[:length]))
        directory.write(self.shards.file, image, length)
        return computed.result() if computed else str(checksum)

    def _write_in_place(self, directory: Place) -> str:
        digest = xxhash.xxh3_128()

        def make(start: int, memory: memoryview) -> None:
            self.read_state(start, memory)
            digest.update(memory)

        directory.write_made(self.shards.file, self.shards.layout.nbytes, make)
        return digest.hexdigest()


def _no_room(needed: int, room: int) -> str:
    return (
        f"a copy of {bytes_text(needed)} does not fit into the {bytes_text(max(0, room))} of host memory that it may take: "
        "training waits while a checkpoint is written"
    )
