"""Host memory in slots: taken and given back, never returned to the system while the run lasts.

Chunks are added while the first step finds out how much it needs; after that the same slots are used again
every step. Knows bytes, not what they mean.
"""

import weakref
from bisect import insort
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fullshard import direct_io
from fullshard.errors import FullshardError

ALIGNMENT = 512  # bytes: what the GPU's copy engines like best
SMALLEST, LARGEST = 1 << 26, 1 << 30  # bytes of a chunk


@dataclass(frozen=True)
class Slot:
    """Some bytes of a chunk."""

    chunk: "_Chunk"
    start: int
    end: int

    @property
    def bytes(self) -> Tensor:
        return self.chunk.memory[self.start : self.end]


class Slots:
    """First fit over chunks of host memory, pinned or not. `paged`: chunks begin with a page, so that slots of whole pages
    are fit for direct requests to a disk."""

    def __init__(self, pinned: bool, *, paged: bool = False):
        self.pinned, self.paged = pinned, paged
        self.chunks: list[_Chunk] = []

    @property
    def nbytes(self) -> int:
        """What is held from the system."""
        return sum(c.memory.numel() for c in self.chunks)

    def take(self, nbytes: int) -> Slot:
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for chunk in self.chunks:
            if (start := chunk.holes.take(rounded)) is not None:
                return Slot(chunk, start, start + nbytes)
        # A quarter of what there is already: few chunks, and little of the last one in vain.
        chunk = _Chunk(max(rounded, min(LARGEST, max(SMALLEST, self.nbytes // 4))), self.pinned, self.paged)
        self.chunks.append(chunk)
        start = chunk.holes.take(rounded)
        assert start is not None
        return Slot(chunk, start, start + nbytes)

    def give(self, slot: Slot) -> None:
        slot.chunk.holes.give(slot.start, -(-slot.end // ALIGNMENT) * ALIGNMENT)


class Holes:
    """What is free of a number of bytes."""

    def __init__(self, nbytes: int):
        self.free = [(0, nbytes)]  # in order: start, end

    def take(self, nbytes: int) -> int | None:
        """Where so many bytes begin that are free no more; None if there is no room."""
        for i, (start, end) in enumerate(self.free):
            if end - start >= nbytes:
                self.free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give(self, start: int, end: int) -> None:
        insort(self.free, (start, end))
        i = self.free.index((start, end))
        if i + 1 < len(self.free) and self.free[i + 1][0] == end:
            self.free[i : i + 2] = [(start, self.free[i + 1][1])]
        if i and self.free[i - 1][1] == start:
            self.free[i - 1 : i + 1] = [(self.free[i - 1][0], self.free[i][1])]


@dataclass(eq=False)
class _Chunk:
    nbytes: int
    pinned: bool
    paged: bool
    memory: Tensor = field(init=False)
    holes: Holes = field(init=False)

    def __post_init__(self) -> None:
        self.memory = _whole_pages(self.nbytes) if self.paged else torch.empty(self.nbytes, dtype=torch.uint8)
        self.holes = Holes(self.nbytes)
        if self.pinned:
            _pin(self.memory)
            weakref.finalize(self, _unpin, self.memory)


def _whole_pages(nbytes: int) -> Tensor:
    memory = torch.empty(nbytes + direct_io.ALIGNMENT, dtype=torch.uint8)
    skip = -memory.data_ptr() % direct_io.ALIGNMENT
    return memory[skip : skip + nbytes]


def _pin(memory: Tensor) -> None:
    """Not by torch's own pinned memory: its cache rounds up to powers of two and only grows."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error):
        raise FullshardError(
            f"{memory.numel()} bytes of host memory cannot be pinned ({torch.cuda.cudart().cudaGetErrorString(error)}); "
            "let less rest in host memory, or raise the limit on locked memory (ulimit -l)"
        )


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
