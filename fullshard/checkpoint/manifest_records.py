"""The manifest of a save: what each rank's file holds, as records of tensors and files."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord

TensorTypes = Mapping[str, tuple[tuple[int, ...], str]]  # name: shape of the whole tensor, safetensors dtype


@dataclass(frozen=True)
class ShardFile:
    """The contents of one rank's file. `chunks`: name of the tensor, and the chunk of it that the file holds."""

    name: str
    nbytes: int
    chunks: tuple[tuple[str, Chunk], ...]

    def to_json(self) -> list[Any]:
        return [self.name, self.nbytes, [[name, c.offset, c.start, c.shape] for name, c in self.chunks]]

    @classmethod
    def from_json(cls, tree: Sequence[Any]) -> "ShardFile":
        """The inverse of `to_json`."""
        file, nbytes, chunks = tree
        return cls(file, nbytes, tuple((name, Chunk(file, at, tuple(start), tuple(shape))) for name, at, start, shape in chunks))


@dataclass(frozen=True)
class ManifestFields:
    """The fields of a manifest other than tensors, files and date."""

    step: int = 0
    cursor: int | None = None
    plan: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None
    state: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def tensor_records(
    types: TensorTypes, files: Sequence[ShardFile], nodes: Sequence[int | None], own_node: int | None
) -> dict[str, TensorRecord]:
    """A record for each tensor. `nodes[i]` is the node whose disk holds `files[i]`, or None with a shared disk. If several
    nodes have a chunk, the record names the copy of `own_node`."""
    chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {}
    for file, _ in sorted(zip(files, nodes, strict=True), key=lambda pair: pair[1] == own_node):  # the own node's come last
        chunks |= {(name, chunk.start): chunk for name, chunk in file.chunks}
    by_name: dict[str, list[Chunk]] = {name: [] for name in types}
    for (name, _), chunk in chunks.items():
        by_name[name].append(chunk)
    ordered = {name: tuple(sorted(own, key=lambda c: c.start)) for name, own in by_name.items()}
    return {name: TensorRecord(shape, dtype, ordered[name]) for name, (shape, dtype) in sorted(types.items())}


def file_records(files: Sequence[ShardFile], checksums: Sequence[str], nodes: Sequence[int | None]) -> dict[str, FileRecord]:
    """A record for each file that holds something."""
    rows = zip(files, checksums, nodes, strict=True)
    return {file.name: FileRecord(file.nbytes, checksum, node) for file, checksum, node in rows if file.chunks}


def make_manifest(
    tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord], fields: ManifestFields, created: float
) -> Manifest:
    values = {f.name: getattr(fields, f.name) for f in dataclasses.fields(fields)}
    return Manifest(tensors=tensors, files=files, created=created, **values)
