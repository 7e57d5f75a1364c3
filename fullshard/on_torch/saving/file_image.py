"""One rank's file as it will be on disk, in memory: staging copies the items here, and writing is one pass over it."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from fullshard.base.direct_io import aligned_size
from fullshard.checkpoint.file_layout import FileLayout
from fullshard.on_torch.saving.write_items import ItemSource, dtype_of, item_bytes
from fullshard.storage.pinned_arena import Arena, bytes_of

GROUP_BYTES = 1 << 19  # items are copied in groups of about this size, which fits into a core's cache


class ImageBuffer:
    """Host memory for one file image, reused by every save. Pinned if the state is on a GPU."""

    def __init__(self, pinned: bool):
        self.pinned, self.arena, self.tensor = pinned, Arena(0, pinned, "the image of a checkpoint"), torch.empty(0)

    def reserve(self, nbytes: int) -> Tensor:
        """Memory of at least `nbytes`."""
        if self.arena.nbytes < nbytes:
            self.close()
            self.arena = Arena(nbytes, self.pinned, self.arena.why)
            self.tensor = self.arena.take(self.arena.nbytes)
        return self.tensor

    def close(self) -> None:
        self.arena.close()
        self.tensor = torch.empty(0)


class FileImage:
    """A file's bytes in memory. Created once for a layout and filled at each save.

    `targets[i]` is the memory of item i. `groups` are slices of items that are copied together, `group_targets` their
    memory, and `group_bytes` the same as bytes; the header belongs to the first group.
    """

    def __init__(self, layout: FileLayout, items: Sequence[WriteItem], buffer: ImageBuffer):
        self.layout, self.items = layout, items
        memory = buffer.reserve(layout.nbytes)
        self.memory = bytes_of(memory[: aligned_size(layout.nbytes)])
        self.memory[: len(layout.header)] = layout.header
        self.targets = [self._view(memory, i, start) for i, start in zip(items, layout.starts, strict=True)]
        self.groups = self._groups()
        self.group_targets = [self._group_view(memory, group) for group in self.groups]
        ends = [*layout.starts, layout.nbytes]
        self.group_bytes = [self.memory[a:b] for a, b in pairwise([0, *(ends[group.stop] for group in self.groups)])]

    def _view(self, memory: Tensor, item: WriteItem, start: int) -> Tensor:
        return memory[start : start + item_bytes(item)].view(dtype_of(item))

    def _groups(self) -> list[slice]:
        """Slices of consecutive items of one dtype, of at least `GROUP_BYTES` where there are enough."""
        found, first, size, items = [], 0, 0, self.items
        for i, item in enumerate(items):
            size += item_bytes(item)
            if size >= GROUP_BYTES or i == len(items) - 1 or dtype_of(items[i + 1]) != dtype_of(item):
                found.append(slice(first, i + 1))
                first, size = i + 1, 0
        return found

    def _group_view(self, memory: Tensor, group: slice) -> Tensor:
        first, last = group.start, group.stop - 1
        end = self.layout.starts[last] + item_bytes(self.items[last])
        return memory[self.layout.starts[first] : end].view(dtype_of(self.items[first]))

    def copies(self, sources: Sequence[Tensor]) -> list[Callable[[], None]]:
        """One function for each group, which copies it from CPU tensors without autograd. A copy releases the GIL."""
        found = zip(self.group_targets, self.groups, strict=True)
        return [partial(_copy_group, sources[group], target, self.targets[group]) for target, group in found]

    def fill(self, sources: Sequence[ItemSource]) -> None:
        """Copy all items. Copies from a GPU are queued on the current stream."""
        from_cpu: list[tuple[Tensor, Tensor]] = []
        for target, source in zip(self.targets, sources, strict=True):
            if not isinstance(source, Tensor):
                source.read(0, target.view(-1).view(torch.uint8))
            elif source.is_cuda:
                target.view(source.shape).copy_(source, non_blocking=True)
            else:
                from_cpu.append((target.view(source.shape), source))
        if from_cpu:  # one call for all: with one call each, the calls themselves take half the time
            torch._foreach_copy_([target for target, _ in from_cpu], [source for _, source in from_cpu])


def flattened(source: ItemSource) -> ItemSource:
    """A one-dimensional view of a contiguous tensor; anything else unchanged. Flat tensors are copied faster."""
    return source.view(-1) if isinstance(source, Tensor) and source.is_contiguous() else source


def _copy_group(sources: Sequence[Tensor], group_target: Tensor, targets: Sequence[Tensor]) -> None:
    if all(s.ndim == 1 for s in sources):
        torch.cat(list(sources), out=group_target)  # takes two thirds of the time of single copies
    else:
        torch._foreach_copy_([t.view(s.shape) for t, s in zip(targets, sources, strict=True)], list(sources))
