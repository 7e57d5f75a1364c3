"""The items of a DCP save plan: which tensors, or parts of sharded ones, a rank writes, and where their values are.

DCP's planner decides which rank writes which items.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.file_layout import FileItem, FileLayout, write_once
from fullshard.checkpoint.manifest_records import TensorTypes
from fullshard.checkpoint.shared_disks import Nodes
from fullshard.on_torch.tensors.dtypes import SAFETENSORS_NAMES


class StoredItem(Protocol):
    """An item whose values are on disk."""

    def read(self, start: int, into: Tensor) -> None:
        """Fill `into` with the item's bytes from `start` on."""


ItemSource = Tensor | StoredItem  # where an item's values are read from


def read_file(layout: FileLayout, sources: Sequence[ItemSource], start: int, into: Tensor) -> None:
    """Fill `into` with the bytes of a rank's file from `start` on, read from the items' sources."""
    header = layout.header[start : start + len(into)]
    if header:
        into[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for i, low, high in layout.overlaps(start, start + len(into)):
        _read(sources[i], low - layout.starts[i], into[low - start : high - start])


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


def wide_first(items: Sequence[WriteItem]) -> list[WriteItem]:
    """The items in the order of `FileLayout`."""
    return sorted(items, key=lambda i: -dtype_of(i).itemsize)


def file_item(item: WriteItem) -> FileItem:
    box = chunk_of(item)
    whole = tuple(item.tensor_data.size)  # type: ignore[union-attr]
    return FileItem(item.index.fqn, safetensors_dtype(item), whole, tuple(box.offsets), tuple(box.sizes))


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


def once_per_node(plans: Sequence[SavePlan], nodes: Nodes) -> list[SavePlan]:
    """Save plans in which each node writes each of its items once."""
    kept = write_once([[(i.index, i.tensor_storage_size() or 0) for i in plan.items] for plan in plans], nodes)
    return [dataclasses.replace(p, items=[i for i in p.items if i.index in k]) for p, k in zip(plans, kept, strict=True)]


def tensor_types(metadata: Metadata) -> TensorTypes:
    """Shape and dtype of all tensors of a save."""
    found = metadata.state_dict_metadata.items()
    return {n: (tuple(t.size), SAFETENSORS_NAMES[t.properties.dtype]) for n, t in found if isinstance(t, TensorStorageMetadata)}
