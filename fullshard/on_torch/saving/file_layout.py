"""The layout of one rank's safetensors file: the items of a DCP save plan, and the offset of each.

An item is a tensor, or this rank's part of a sharded one. DCP's planner decides which rank writes which items.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fullshard.checkpoint.manifest import Chunk, chunk_name
from fullshard.checkpoint.safetensors import make_header
from fullshard.direct_io import ALIGNMENT
from fullshard.errors import FullshardError
from fullshard.on_torch.dtypes import SAFETENSORS_NAMES


class StoredItem(Protocol):
    """An item whose values are on disk."""

    def read(self, start: int, into: Tensor) -> None:
        """Fill `into` with the item's bytes from `start` on."""


ItemSource = Tensor | StoredItem  # where an item's values are read from


@dataclass(frozen=True)
class ShardFile:
    """The contents of one rank's file. `chunks`: (tensor name, dtype, shape of the whole tensor, chunk)."""

    name: str
    nbytes: int
    chunks: tuple[tuple[str, str, tuple[int, ...], Chunk], ...]


class FileLayout:
    """One rank's file: `starts[i]` is the byte at which `items[i]` begins."""

    def __init__(self, items: Sequence[WriteItem]):
        # Wide dtypes first: every tensor is then aligned without gaps, which the format does not allow.
        self.items = sorted(items, key=lambda i: -dtype_of(i).itemsize)
        entries = [(name_in_file(i), safetensors_dtype(i), chunk_of(i).sizes) for i in self.items]
        header, self.starts = make_header(entries, {"format": "pt"}, ALIGNMENT)
        self.header = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.nbytes = len(header) + sum(item_bytes(i) for i in self.items)

    def shard_file(self, name: str) -> ShardFile:
        """The contents of the file, for the manifest."""
        chunks = []
        for item, start in zip(self.items, self.starts, strict=True):
            box, shape = chunk_of(item), item.tensor_data.size  # type: ignore[union-attr]
            chunk = Chunk(name, start, tuple(box.offsets), tuple(box.sizes))
            chunks.append((item.index.fqn, safetensors_dtype(item), tuple(shape), chunk))
        return ShardFile(name, self.nbytes, tuple(chunks))

    def fill(self, sources: Sequence[ItemSource], start: int, into: Tensor) -> None:
        """Fill `into` with the file's bytes from `start` on, read from the items' sources."""
        header = self.header[start : start + len(into)]
        into[: len(header)] = header
        for i, low, high in self.overlaps(start, start + len(into)):
            _read(sources[i], low - self.starts[i], into[low - start : high - start])

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(item, low, high) of each item with bytes between `start` and `stop` of the file, and of those bytes."""
        for i in range(max(0, bisect_right(self.starts, start) - 1), len(self.items)):
            low, high = max(start, self.starts[i]), min(stop, self.starts[i] + item_bytes(self.items[i]))
            if self.starts[i] >= stop:
                return
            if low < high:
                yield i, low, high


def _read(source: ItemSource, start: int, into: Tensor) -> None:
    if isinstance(source, Tensor):
        into.copy_(source.detach().contiguous().view(-1).view(torch.uint8)[start : start + len(into)])
    else:
        source.read(start, into)


# -- items --------------------------------------------------------------------------------------------------


def chunk_of(item: WriteItem) -> ChunkStorageMetadata:
    """The box of the whole tensor that an item holds."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def dtype_of(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def item_bytes(item: WriteItem) -> int:
    return chunk_of(item).sizes.numel() * dtype_of(item).itemsize


def name_in_file(item: WriteItem) -> str:
    box = chunk_of(item)
    return chunk_name(item.index.fqn, item.tensor_data.size, box.offsets, box.sizes)  # type: ignore[union-attr]


def safetensors_dtype(item: WriteItem) -> str:
    dtype = dtype_of(item)
    if dtype not in SAFETENSORS_NAMES:
        raise FullshardError(f"{item.index.fqn} is {str(dtype)[6:]}, which safetensors does not support; convert it first")
    return SAFETENSORS_NAMES[dtype]


# -- plans --------------------------------------------------------------------------------------------------


def without_empty_items(plan: SavePlan) -> SavePlan:
    """A rank's save plan without items of zero bytes. Raises where an item is not a tensor."""
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            raise FullshardError(f"{item.index.fqn} is not a tensor, and nothing is pickled; put it into `extra`, as JSON")
    return dataclasses.replace(plan, items=[i for i in plan.items if item_bytes(i)])


def planned_bytes(plan: SavePlan) -> int:
    return sum(item_bytes(i) for i in plan.items)
