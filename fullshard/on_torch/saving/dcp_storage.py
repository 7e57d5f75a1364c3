"""fullshard's checkpoint format as a storage of `torch.distributed.checkpoint`, whose planners split and reshard.

A rank's items are laid out as one file image: the header of a safetensors file, then the tensors. Staging copies them
to where they will lie in the file; writing is then one pass over memory that the training no longer touches.
"""

import dataclasses
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, SavePlan, SavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fullshard.checkpoint import commit
from fullshard.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord, checksum, chunk_name
from fullshard.checkpoint.place import open_place
from fullshard.checkpoint.reader import Checkpoint
from fullshard.checkpoint.safetensors import make_header
from fullshard.direct_io import ALIGNMENT, aligned_size
from fullshard.errors import FullshardError
from fullshard.on_torch.dtypes import SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from fullshard.storage.host import Arena, bytes_of

GROUP = 1 << 19  # bytes that are copied at once, where two threads share the copying; a core's cache holds them


@dataclass(frozen=True)
class About:
    """What a manifest says besides tensors and files."""

    step: int = 0
    cursor: int | None = None
    plan: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None
    state: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One rank's file as it is planned, and the chunks in it."""

    file: str
    nbytes: int
    chunks: tuple[tuple[str, str, tuple[int, ...], Chunk], ...]  # name, dtype, shape of the whole tensor


class Memory:
    """Room for one file image, kept from save to save; pinned, where there is a GPU to copy from."""

    def __init__(self, pinned: bool):
        self.pinned, self.arena, self.tensor = pinned, Arena(0, pinned, "the image of a checkpoint"), torch.empty(0)

    def reserve(self, nbytes: int) -> Tensor:
        if self.arena.nbytes < nbytes:
            self.close()
            self.arena = Arena(nbytes, self.pinned, self.arena.why)
            self.tensor = self.arena.take(self.arena.nbytes)
        return self.tensor

    def close(self) -> None:
        self.arena.close()
        self.tensor = torch.empty(0)


class AtRest(Protocol):
    """An item that is in no memory."""

    def read(self, start: int, into: Tensor) -> None:
        """Its bytes from `start` on."""


Source = Tensor | AtRest  # where an item's values are


class Layout:
    """One rank's file: where each item of a save plan lies in it."""

    def __init__(self, items: Sequence[WriteItem]):
        # Wide dtypes first: then every tensor is aligned without gaps, which the format does not allow.
        self.items = sorted(items, key=lambda i: -i.tensor_data.properties.dtype.itemsize)  # type: ignore[union-attr]
        entries = [(name_in_file(i), word_of(i), _chunk(i).sizes) for i in self.items]
        header, self.starts = make_header(entries, {"format": "pt"}, ALIGNMENT)
        self.header = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.nbytes = len(header) + sum(_nbytes(i) for i in self.items)

    def dtype(self, i: int) -> torch.dtype:
        return self.items[i].tensor_data.properties.dtype  # type: ignore[union-attr]

    def part(self, file: str) -> Part:
        """What lies where in the file."""
        chunks = []
        for item, at in zip(self.items, self.starts, strict=True):
            box, whole = _chunk(item), item.tensor_data.size  # type: ignore[union-attr]
            chunks.append((item.index.fqn, word_of(item), tuple(whole), Chunk(file, at, tuple(box.offsets), tuple(box.sizes))))
        return Part(file, self.nbytes, tuple(chunks))

    def make(self, sources: Sequence[Source], at: int, into: Tensor) -> None:
        """The file's bytes from `at` on, from where the items are."""
        head = self.header[at : at + len(into)]
        into[: len(head)] = head
        for i, low, high in self.spans(at, at + len(into)):
            _read(sources[i], low - self.starts[i], into[low - at : high - at])

    def spans(self, at: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Which items lie between two places of the file, and from where to where."""
        for i in range(max(0, bisect_right(self.starts, at) - 1), len(self.items)):
            low, high = max(at, self.starts[i]), min(end, self.starts[i] + _nbytes(self.items[i]))
            if self.starts[i] >= end:
                return
            if low < high:
                yield i, low, high


def _read(source: Source, start: int, into: Tensor) -> None:
    if isinstance(source, Tensor):
        into.copy_(source.detach().contiguous().view(-1).view(torch.uint8)[start : start + len(into)])
    else:
        source.read(start, into)


class Image:
    """A file in memory. Made once for a layout, filled at each save."""

    def __init__(self, layout: Layout, kept: Memory):
        self.layout = layout
        memory = kept.reserve(layout.nbytes)
        self.memory = bytes_of(memory[: aligned_size(layout.nbytes)])
        memory[: len(layout.header)] = layout.header
        self.targets = [self._view(memory, i, at) for i, at in zip(layout.items, layout.starts, strict=True)]
        self.groups = self._groups()
        self.runs = [self._run(memory, group) for group in self.groups]
        ends = [*layout.starts, layout.nbytes]
        # What each group fills; the header, which lies before the first, counts with it.
        self.parts = [self.memory[a:b] for a, b in pairwise([0, *(ends[group.stop] for group in self.groups)])]

    def _view(self, memory: Tensor, item: WriteItem, at: int) -> Tensor:
        assert item.tensor_data is not None
        return memory[at : at + _nbytes(item)].view(item.tensor_data.properties.dtype)

    def _groups(self) -> list[slice]:
        """The items cut into runs of one dtype and `GROUP` bytes, or one item."""
        found, first, size, items = [], 0, 0, self.layout.items
        for i, item in enumerate(items):
            size += _nbytes(item)
            if size >= GROUP or i == len(items) - 1 or word_of(items[i + 1]) != word_of(item):
                found.append(slice(first, i + 1))
                first, size = i + 1, 0
        return found

    def _run(self, memory: Tensor, group: slice) -> Tensor:
        """What a group fills."""
        first, last = self.layout.items[group.start], self.layout.items[group.stop - 1]
        assert first.tensor_data is not None
        end = self.layout.starts[group.stop - 1] + _nbytes(last)
        return memory[self.layout.starts[group.start] : end].view(first.tensor_data.properties.dtype)

    def copies(self, sources: Sequence[Tensor]) -> list[Callable[[], None]]:
        """What is to be done to fill the image from a CPU's memory, of tensors without autograd. One call copies many, and
        leaves the interpreter alone meanwhile."""
        found = zip(self.runs, self.groups, strict=True)
        return [partial(_join, sources[group], run, self.targets[group]) for run, group in found]

    def fill(self, sources: Sequence[Source]) -> None:
        """Copy the items, in their order. From a GPU it is queued on the current stream."""
        here: list[tuple[Tensor, Tensor]] = []
        for target, source in zip(self.targets, sources, strict=True):
            if not isinstance(source, Tensor):
                source.read(0, target.view(-1).view(torch.uint8))
            elif source.is_cuda:
                target.view(source.shape).copy_(source, non_blocking=True)
            else:
                here.append((target.view(source.shape), source))
        if here:  # one call for all: on a CPU the calls themselves would be half the stall
            torch._foreach_copy_([target for target, _ in here], [source for _, source in here])

    def checksum(self) -> str:
        """Of the file, once the image is filled."""
        return checksum(self.memory[: self.layout.nbytes])


def flat(source: Source) -> Source:
    """Without dims, where no copy is needed for that: then items are joined at once."""
    return source.view(-1) if isinstance(source, Tensor) and source.is_contiguous() else source


def _join(sources: Sequence[Tensor], run: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy tensors to where they lie one after the other: `cat` takes two thirds of the time that copies take."""
    if all(s.ndim == 1 for s in sources):
        torch.cat(list(sources), out=run)
    else:
        torch._foreach_copy_([t.view(s.shape) for t, s in zip(targets, sources, strict=True)], list(sources))


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _nbytes(item: WriteItem) -> int:
    return _chunk(item).sizes.numel() * item.tensor_data.properties.dtype.itemsize  # type: ignore[union-attr]


def name_in_file(item: WriteItem) -> str:
    box = _chunk(item)
    return chunk_name(item.index.fqn, item.tensor_data.size, box.offsets, box.sizes)  # type: ignore[union-attr]


def word_of(item: WriteItem) -> str:
    dtype = item.tensor_data.properties.dtype  # type: ignore[union-attr]
    if dtype not in SAFETENSORS_NAMES:
        raise FullshardError(f"{item.index.fqn} is {str(dtype)[6:]}, which safetensors has no word for; convert it first")
    return SAFETENSORS_NAMES[dtype]


def fitting(plan: SavePlan) -> SavePlan:
    """A rank's part of a plan, without empty boxes; what is no tensor is refused."""
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            raise FullshardError(f"{item.index.fqn} is no tensor; nothing is pickled: put it into `extra`, as JSON")
    return dataclasses.replace(plan, items=[i for i in plan.items if _nbytes(i)])


def file_name(index: int, count: int) -> str:
    return f"shard-{index:05d}-of-{count:05d}.safetensors"


def planned_bytes(plan: SavePlan) -> int:
    return sum(_nbytes(i) for i in plan.items)


def tensor_records(
    metadata: Metadata, parts: Sequence[Part], nodes: Sequence[int | None], mine: int | None
) -> dict[str, TensorRecord]:
    """`nodes`: for each file the node on whose disk it lies, or None; of chunks that several have, node `mine`'s is named."""
    chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {}
    for one, _ in sorted(zip(parts, nodes, strict=True), key=lambda pair: pair[1] == mine):
        chunks |= {(name, chunk.start): chunk for name, _, _, chunk in one.chunks}
    by_name: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
    for (name, _), chunk in chunks.items():
        by_name[name].append(chunk)
    tensors = {}
    for name, found in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(found, TensorStorageMetadata)
        ordered = tuple(sorted(by_name[name], key=lambda c: c.start))
        tensors[name] = TensorRecord(tuple(found.size), SAFETENSORS_NAMES[found.properties.dtype], ordered)
    return tensors


def file_records(parts: Sequence[Part], sums: Sequence[str], nodes: Sequence[int | None]) -> dict[str, FileRecord]:
    found = zip(parts, sums, nodes, strict=True)
    return {part.file: FileRecord(part.nbytes, total, node) for part, total, node in found if part.chunks}


def make_manifest(tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord], about: About, now: float) -> Manifest:
    about_fields = {f.name: getattr(about, f.name) for f in dataclasses.fields(about)}
    return Manifest(tensors=tensors, files=files, created=now, **about_fields)


# -- DCP's interfaces ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Assigned:
    nonce: str
    file: str


class Writer(StorageWriter):
    """For `torch.distributed.checkpoint.save(state_dict, storage_writer=Writer(shelf, About(step=…)))`, on a shared
    filesystem or an object store. `fullshard.checkpoint.save` does more: it stages, checks space, and agrees on failure."""

    def __init__(self, shelf: str | Path, about: About | None = None):
        self.shelf, self.about, self.memory = open_place(shelf), about or About(), Memory(pinned=False)
        self.held: Any = None

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.shelf = open_place(os.fspath(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return fitting(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        nonce = commit.new_nonce()
        self.held = commit.begin(commit.draft(self.shelf, self.about.step, nonce))
        self.held.__enter__()
        files = [file_name(i, len(plans)) for i in range(len(plans))]
        return [dataclasses.replace(p, storage_data=_Assigned(nonce, f)) for p, f in zip(plans, files, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.assigned: _Assigned = plan.storage_data
        layout = Layout(plan.items)
        image = Image(layout, self.memory)
        image.fill([_resolved(planner, item) for item in layout.items])
        part = layout.part(self.assigned.file)
        if part.chunks:
            self._draft().staging.write(part.file, image.memory, layout.nbytes)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), part.nbytes, (part, image.checksum()))])
        return future

    def _draft(self) -> commit.Draft:
        return commit.draft(self.shelf, self.about.step, self.assigned.nonce)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [r.storage_data for rank in results for r in rank]
        parts, sums = [part for part, _ in written], [total for _, total in written]
        nodes = [None] * len(parts)
        tensors, files = tensor_records(metadata, parts, nodes, None), file_records(parts, sums, nodes)
        commit.commit(self._draft(), make_manifest(tensors, files, self.about, round(time.time(), 3)).to_bytes())
        self.held.__exit__(None, None, None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def _resolved(planner: SavePlanner, item: WriteItem) -> Tensor:
    data = planner.resolve_data(item)
    assert isinstance(data, Tensor)
    return data.detach()


class Reader(StorageReader):
    """For `torch.distributed.checkpoint.load(state_dict, storage_reader=Reader(where))`. Checks no checksums itself."""

    def __init__(self, where: str | Path | Checkpoint):
        self.checkpoint = where if isinstance(where, Checkpoint) else Checkpoint(commit.find(where))

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint = Checkpoint(commit.find(os.fspath(checkpoint_id)))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return to_metadata(self.checkpoint.manifest.tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.chunks = {MetadataIndex(n, c.start): (t, c) for n, t in self.checkpoint.manifest.tensors.items() for c in t.chunks}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            record, chunk = self.chunks[item.storage_index]
            first = [s + o for s, o in zip(chunk.start, item.storage_offsets, strict=True)]
            box = [(a, a + n) for a, n in zip(first, item.lengths, strict=True)]
            part = torch.empty(tuple(item.lengths), dtype=SAFETENSORS_DTYPES[record.dtype])
            memory = part.reshape(-1).view(torch.uint8).numpy().data
            self.checkpoint.read_chunk(chunk, box, record.item_bytes, memory)
            target = planner.resolve_tensor(item)
            target.detach().copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def to_metadata(tensors: Mapping[str, TensorRecord]) -> Metadata:
    """What DCP's planners want to know."""
    found: dict[str, Any] = {}
    for name, record in tensors.items():
        if record.dtype not in SAFETENSORS_DTYPES:
            raise FullshardError(f"{name} is {record.dtype}, which torch has no dtype for")
        chunks = [ChunkStorageMetadata(torch.Size(c.start), torch.Size(c.shape)) for c in record.chunks]
        found[name] = TensorStorageMetadata(
            TensorProperties(dtype=SAFETENSORS_DTYPES[record.dtype]), torch.Size(record.shape), chunks
        )
    return Metadata(found)
