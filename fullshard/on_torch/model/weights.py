"""Load weights from a directory of safetensors files, as Hugging Face's `save_pretrained` writes them.

Every rank reads only the byte ranges of its own shards. So it never holds more than its shards and its part of one
tensor.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.file_rules import FilePiece, FileRule, bare_name
from fullshard.checkpoint.reader import intersection
from fullshard.checkpoint.safetensors import SafetensorsDirectory
from fullshard.checkpoint.weight_files import FLOATS, refuse_dtype, refuse_extra, refuse_missing, refuse_shape
from fullshard.on_torch.model.hf_files import file_rules
from fullshard.on_torch.model.scalars import as_vector
from fullshard.on_torch.model.tied_parameters import parameter_names
from fullshard.on_torch.tensors.dtypes import SAFETENSORS_DTYPES
from fullshard.on_torch.tensors.shard_ranges import local_box, local_tensor

LOADABLE = (*FLOATS, "I64")  # dtypes that a model's tensors can be read from


class Weights:
    """The safetensors files of a directory, matched to the tensors of a model.

    Made before the model is sharded, so that wrong files are refused before memory is allocated.
    """

    def __init__(self, model: nn.Module, directory: str | Path):
        self.files = SafetensorsDirectory(Path(directory))
        self.rules = self._match(model)
        found = self._pieces()
        named = ((name, [found[n] for n in map(bare_name, names) if n in found]) for name, _, names in _with_all_names(model))
        self.pieces = {name: pieces[0] for name, pieces in named if pieces}
        self._refuse_missing(model)
        self._refuse_extra(model)

    def tensors(self, model: nn.Module) -> Iterator[Tensor]:
        """The tensors of `model` that are in the files."""
        return (tensor for name, tensor in _named_tensors(model) if name in self.pieces)

    def read(self, model: nn.Module) -> None:
        """Read this rank's part of every tensor that is in the files."""
        with torch.no_grad():
            for name, tensor in _named_tensors(model):
                for piece in self.pieces.get(name, ()):
                    self._read_piece(piece, tensor)

    def _read_piece(self, piece: FilePiece, tensor: Tensor) -> None:
        """Read what this rank has of a piece."""
        box = local_box(tensor)
        shared = intersection(piece.box, box)
        if shared is None:
            return
        inside = piece.file_box(shared)
        part = torch.empty([b - a for a, b in inside], dtype=SAFETENSORS_DTYPES[self.files.entries[piece.file].dtype])
        self.files.read(piece.file, inside, part.reshape(-1).view(torch.uint8).numpy().data)
        target = local_tensor(tensor)[tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(shared, box, strict=True))]
        target.copy_(part.permute(piece.order()).reshape(target.shape))

    def _match(self, model: nn.Module) -> list[FileRule]:
        """How the tensors of the files become the model's."""
        wanted = {bare_name(n): as_vector(tensor) for _, tensor, names in _with_all_names(model) for n in names}
        try:
            found = file_rules(model, wanted, {n: e.shape for n, e in self.files.entries.items()})
        except FullshardError as error:
            raise FullshardError(f"{self.files.directory}: {error}") from None
        for rule in found:
            self._refuse_rule(rule, wanted)
        return found

    def _refuse_rule(self, rule: FileRule, wanted: Mapping[str, Tensor]) -> None:
        names = rule.file_names()
        for name in names:
            refuse_dtype(self.files, name, LOADABLE)
        try:
            made = rule.shapes()
        except ValueError:  # tensors that do not fit together
            made = {rule.tensors[0]: rule.files[0][1]}
        for tensor, shape in made.items():
            made_of = ", ".join(pattern for pattern, _ in rule.files)
            refuse_shape(self.files, names[0], shape, wanted[tensor].shape, made_of)

    def _pieces(self) -> dict[str, list[FilePiece]]:
        """The pieces of each of the model's tensors, by its bare name."""
        found: dict[str, list[FilePiece]] = {}
        for rule in self.rules:
            own: dict[str, list[FilePiece]] = {}
            for piece in rule.pieces():
                own.setdefault(piece.tensor, []).append(piece)
            found = own | found  # a tensor that is stored twice is read from the first
        return found

    def _refuse_missing(self, model: nn.Module) -> None:
        wanted = dict(model.named_parameters())
        refuse_missing(self.files, [bare_name(n) for n in wanted if n not in self.pieces and not _is_adapter(n)])

    def _refuse_extra(self, model: nn.Module) -> None:
        used = {name for rule in self.rules for name in rule.file_names()}
        ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []]
        refuse_extra(self.files, used | {n for n in self.files.entries if any(p.search(n) for p in ignored)})


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _with_all_names(model: nn.Module) -> list[tuple[str, Tensor, list[str]]]:
    """(name, tensor, all its names) for each tensor. Tied parameters have several names."""
    names = parameter_names(model)
    return [(n, t, names.get(id(t), [n])) for n, t in _named_tensors(model)]


def _is_adapter(name: str) -> bool:
    return ".lora_" in name
