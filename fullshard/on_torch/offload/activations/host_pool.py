"""Host memory in blocks, which are taken and given back. The pool keeps its memory while the run lasts.

It adds chunks while the first step finds out how much it needs. Later steps reuse the same blocks. Knows bytes only.
"""

import weakref
from bisect import insort
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fullshard.base import direct_io
from fullshard.base.errors import HostMemoryError

ALIGNMENT = 512  # bytes: the fastest for a GPU's copy engines
SMALLEST, LARGEST = 1 << 26, 1 << 30  # bytes of a chunk


@dataclass(frozen=True)
class HostBlock:
    """A range of a chunk."""

    chunk: "_Chunk"
    start: int
    end: int

    @property
    def bytes(self) -> Tensor:
        return self.chunk.memory[self.start : self.end]


class HostPool:
    """First fit over chunks of host memory, pinned or not. `paged`: chunks begin at a page, so that blocks of whole pages can be
    used for direct I/O."""

    def __init__(self, pinned: bool, *, paged: bool = False):
        self.pinned, self.paged = pinned, paged
        self.chunks: list[_Chunk] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(c.memory.numel() for c in self.chunks)

    def take(self, nbytes: int) -> HostBlock:
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for chunk in self.chunks:
            if (start := chunk.ranges.take(rounded)) is not None:
                return HostBlock(chunk, start, start + nbytes)
        # A quarter of what there is: few chunks, and little unused memory in the last one.
        chunk = _Chunk(max(rounded, min(LARGEST, max(SMALLEST, self.nbytes // 4))), self.pinned, self.paged)
        self.chunks.append(chunk)
        start = chunk.ranges.take(rounded)
        assert start is not None
        return HostBlock(chunk, start, start + nbytes)

    def give(self, block: HostBlock) -> None:
        block.chunk.ranges.give(block.start, -(-block.end // ALIGNMENT) * ALIGNMENT)


class FreeRanges:
    """The free ranges of a number of bytes."""

    def __init__(self, nbytes: int):
        self.free = [(0, nbytes)]  # in order: start, end

    def take(self, nbytes: int) -> int | None:
        """Take so many bytes; return their start, or None if there is no room."""
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
    ranges: FreeRanges = field(init=False)

    def __post_init__(self) -> None:
        self.memory = _whole_pages(self.nbytes) if self.paged else torch.empty(self.nbytes, dtype=torch.uint8)
        self.ranges = FreeRanges(self.nbytes)
        if self.pinned:
            _pin(self.memory)
            weakref.finalize(self, _unpin, self.memory)


def _whole_pages(nbytes: int) -> Tensor:
    memory = torch.empty(nbytes + direct_io.ALIGNMENT, dtype=torch.uint8)
    skip = -memory.data_ptr() % direct_io.ALIGNMENT
    return memory[skip : skip + nbytes]


def _pin(memory: Tensor) -> None:
    """Register memory with CUDA. Torch's pinned memory would come from a cache that rounds up to powers of two and only grows."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error):
        raise HostMemoryError(
            f"{memory.numel()} bytes of host memory cannot be pinned ({torch.cuda.cudart().cudaGetErrorString(error)}); "
            "let less rest in host memory, or raise the limit on locked memory (ulimit -l)"
        )


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
