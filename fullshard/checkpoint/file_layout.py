"""The layout of one rank's safetensors file, and what a save writes into all files of a checkpoint.

An item is a tensor, or this rank's part of a sharded one. The engine decides which rank has which items.
"""

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.base.direct_io import ALIGNMENT
from fullshard.checkpoint.manifest import Chunk, TensorRecord, chunk_name, field_text, shard_name, tensors_text
from fullshard.checkpoint.manifest_records import ShardFile, TensorTypes, tensor_records
from fullshard.checkpoint.safetensors import ITEM_BYTES, make_header
from fullshard.checkpoint.shared_disks import Nodes
from fullshard.ranks.agreement import RankAgreement


@dataclass(frozen=True)
class FileItem:
    """A box of a tensor: `whole` is the tensor's shape, `start` and `shape` are the box's. `dtype` is safetensors' name."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class FileLayout:
    """One rank's file: `starts[i]` is the byte at which `items[i]` begins. The order of the given items is kept, but for wide
    dtypes, which come first: every tensor is then aligned without gaps, which the format does not allow."""

    def __init__(self, items: Sequence[FileItem]):
        self.items = sorted(items, key=lambda i: -ITEM_BYTES[i.dtype])
        entries = [(chunk_name(i.name, i.whole, i.start, i.shape), i.dtype, i.shape) for i in self.items]
        self.header, self.starts = make_header(entries, {"format": "pt"}, ALIGNMENT)
        self.nbytes = len(self.header) + sum(i.nbytes for i in self.items)

    def shard_file(self, name: str) -> ShardFile:
        """The contents of the file, for the manifest."""
        placed = zip(self.items, self.starts, strict=True)
        return ShardFile(name, self.nbytes, tuple((i.name, Chunk(name, start, i.start, i.shape)) for i, start in placed))

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(item, low, high) of each item with bytes between `start` and `stop` of the file, and of those bytes."""
        for i in range(max(0, bisect_right(self.starts, start) - 1), len(self.items)):
            low, high = max(start, self.starts[i]), min(stop, self.starts[i] + self.items[i].nbytes)
            if self.starts[i] >= stop:
                return
            if low < high:
                yield i, low, high


@dataclass(frozen=True)
class SaveLayout:
    """All that is the same at every save of a state: the files of all ranks, this rank's own, and the manifest's text about
    them. `node_bytes`: what the ranks of this node write. `records` and `texts` are empty on ranks that write no manifest."""

    layout: FileLayout
    file: str
    files: Sequence[ShardFile]
    node_bytes: int
    records: Mapping[str, TensorRecord] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def agree(
        cls, ranks: RankAgreement, nodes: Nodes, items: Sequence[FileItem], types: TensorTypes, plan: dict[str, Any]
    ) -> "SaveLayout":
        """The layout of a save in which this rank writes `items`. `types`: shape and dtype of every tensor. Collective."""
        layout, file = FileLayout(items), shard_name(ranks.rank, ranks.world)
        trees = ranks.gather_results(lambda: layout.shard_file(file).to_json())
        files, node = [ShardFile.from_json(tree) for tree in trees], nodes.of_rank[ranks.rank]
        nbytes = sum(f.nbytes for f, n in zip(files, nodes.of_rank, strict=True) if n == node)
        if not nodes.is_leader:
            return cls(layout, file, files, nbytes)
        records = tensor_records(types, files, nodes.of_file, node)
        texts = {"tensors": tensors_text(records), "plan": field_text("plan", plan)}
        return cls(layout, file, files, nbytes, records, texts)


def write_once(held: Sequence[Sequence[tuple[Hashable, int]]], nodes: Nodes) -> list[set[Hashable]]:
    """Which of the items that each rank holds it writes, if each node writes each of its items once. `held`: of each rank,
    (item, bytes). The rank with the fewest bytes so far takes an item."""
    holders: dict[tuple[int, Hashable], list[tuple[int, int]]] = {}  # (node, item): rank, bytes
    for rank, items in enumerate(held):
        for item, nbytes in items:
            holders.setdefault((nodes.of_rank[rank], item), []).append((rank, nbytes))
    load = [0] * len(held)
    kept: list[set[Hashable]] = [set() for _ in held]
    for (_, item), ranks in holders.items():
        taker, nbytes = min(ranks, key=lambda r: load[r[0]])
        kept[taker].add(item)
        load[taker] += nbytes
    return kept
