"""An arena of host memory of a fixed size, pinned for a GPU. It never grows: a plan says how much is used."""

import mmap
import os
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from fullshard.base.direct_io import ALIGNMENT, aligned_size
from fullshard.base.errors import FullshardError, HostMemoryError
from fullshard.base.text import bytes_text
from fullshard.storage.memory_limits import explain_kill, host_limit, kills, refuse_more_than

__all__ = ["Arena", "bytes_of", "explain_kill", "host_limit", "kills", "refuse_more_than", "room"]

TOUCHED = 32767  # pages in one call: few enough that torch uses one thread
THREADS = 16


class Arena:
    """Memory on pages of its own, all allocated at the start, taken piece by piece and freed as a whole.

    `why` is what the memory is for, in errors. Each piece is registered with CUDA on its own, as a copy may not cross from
    one registration into the next. Torch's pinned memory would come from a cache that rounds up to powers of two and grows.
    """

    def __init__(self, nbytes: int, pinned: bool, why: str):
        refuse_more_than(nbytes, 1, why)
        self.nbytes, self.pinned, self.why, self.used = aligned_size(nbytes), pinned, why, 0
        self._memory = _pages(self.nbytes, why)
        self._registered: list[int] = []
        # Pages that are freed while pinned cannot be pinned again.
        weakref.finalize(self, _unpin, self._registered).atexit = False
        _touch(self._memory)

    def take(self, nbytes: int, align: int = ALIGNMENT) -> Tensor:
        """The next `nbytes`, zeroed, at a multiple of `align`; they take up whole pages."""
        if align % ALIGNMENT:
            raise ValueError(f"align = {align} must be a multiple of {ALIGNMENT}: pages are pinned as a whole")
        start = -(-self.used // align) * align
        end = start + aligned_size(nbytes)
        if end > self.nbytes:
            raise FullshardError(
                f"{self.why}: {bytes_text(nbytes)} more of host memory are wanted when {bytes_text(self.used)} of the"
                f" {bytes_text(self.nbytes)} that were planned are taken"
            )
        if self.pinned and nbytes:
            self._pin(self._memory[start:end])
        self.used = end
        return self._memory[start : start + nbytes]

    def _pin(self, piece: Tensor) -> None:
        code = torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0)
        if int(code) != 0:
            raise HostMemoryError(
                f"{bytes_text(piece.numel())} of host memory for {self.why} cannot be pinned; raise the limit (ulimit -l)"
            )
        self._registered.append(piece.data_ptr())

    def close(self) -> None:
        """Unpin. No copy may be under way. The memory is freed with the last piece."""
        _unpin(self._registered)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.nbytes = self.used = 0


def _unpin(registered: list[int]) -> None:
    if registered:
        torch.cuda.synchronize()
    while registered:
        torch.cuda.cudart().cudaHostUnregister(registered.pop())


def room(sizes: Iterable[int]) -> int:
    """Bytes of an arena for pieces of these sizes."""
    return sum(aligned_size(n) for n in sizes)


def bytes_of(piece: Tensor) -> memoryview:
    """A tensor's memory as bytes, to read and write files."""
    return piece.view(torch.uint8).numpy().data


def _pages(nbytes: int, why: str) -> Tensor:
    """Fresh pages, huge ones where the kernel has them, which no fork copies."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(f"{bytes_text(nbytes)} of host memory for {why} cannot be had: {error.strerror}") from None
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)  # else a fork, as of a data worker, copies all pinned pages
    return torch.frombuffer(memory, dtype=torch.uint8)


def _touch(memory: Tensor) -> None:
    """Have the kernel allocate all pages now, with several cores: one alone takes a minute for 100 GB."""
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(lambda part: part.zero_(), memory[::ALIGNMENT].split(TOUCHED)))
