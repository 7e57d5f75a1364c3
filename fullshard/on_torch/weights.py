"""Load weights from a directory of safetensors files, as Hugging Face's `save_pretrained` writes them.

Every rank reads only the byte ranges of its own shards. So it never holds more than its shards and its part of one
tensor.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from fullshard.checkpoint.safetensors import SafetensorsDirectory, TensorEntry
from fullshard.errors import FullshardError, nearest
from fullshard.on_torch.dtypes import SAFETENSORS_DTYPES
from fullshard.on_torch.shard_ranges import local_box, local_tensor
from fullshard.on_torch.tied_parameters import parameter_names

LOADABLE = ("F64", "F32", "F16", "BF16", "I64")  # dtypes that a model's tensors can be read from
COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")  # in old files; today's models compute these


class Weights:
    """The safetensors files of a directory, matched to the tensors of a model.

    Made before the model is sharded, so that wrong files are refused before memory is allocated.
    """

    def __init__(self, model: nn.Module, directory: str | Path):
        self.files = SafetensorsDirectory(Path(directory))
        self.sources = self._match(model)
        self._refuse_missing(model)
        self._refuse_extra(model)

    def tensors(self, model: nn.Module) -> Iterator[Tensor]:
        """The tensors of `model` that are in the files."""
        return (tensor for name, tensor in _named_tensors(model) if name in self.sources)

    def read(self, model: nn.Module) -> None:
        """Read this rank's part of every tensor that is in the files."""
        with torch.no_grad():
            for name, tensor in _named_tensors(model):
                if source := self.sources.get(name):
                    self._read_one(source, tensor)

    def _read_one(self, source: str, tensor: Tensor) -> None:
        box = local_box(tensor)
        part = torch.empty([stop - start for start, stop in box], dtype=SAFETENSORS_DTYPES[self.files.entries[source].dtype])
        if part.numel():
            self.files.read(source, box, part.reshape(-1).view(torch.uint8).numpy().data)
        local_tensor(tensor).copy_(part)

    def _match(self, model: nn.Module) -> dict[str, str]:
        """The name in the files of each tensor of the model that they have."""
        found: dict[str, str] = {}
        for name, tensor, names in _with_all_names(model):
            spelled = [s for n in names for s in _spellings(n, model) if s in self.files.entries]
            if spelled:
                found[name] = spelled[0]
                _refuse_entry(spelled[0], self.files.entries[spelled[0]], tensor)
        return found

    def _refuse_missing(self, model: nn.Module) -> None:
        wanted = dict(model.named_parameters())
        missing = [n for n in wanted if n not in self.sources and not _is_adapter(n)]
        if missing:
            known = list(self.files.entries)
            first = _spellings(missing[0], model)[0]
            raise FullshardError(
                f"{self.files.directory} has no tensor for {first}{_and_more(missing)}{nearest(first, known)} "
                f"(it has {len(known)}, for example {known[0] if known else 'none'}): it holds another model"
            )

    def _refuse_extra(self, model: nn.Module) -> None:
        used = {s for _, _, names in _with_all_names(model) for n in names for s in _spellings(n, model)}
        ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []]
        extra = [
            n for n in self.files.entries if n not in used and not COMPUTED.search(n) and not any(p.search(n) for p in ignored)
        ]
        if extra:
            raise FullshardError(
                f"{self.files.directory} has {extra[0]}{_and_more(extra)}, which this model lacks: it holds another model"
            )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _with_all_names(model: nn.Module) -> list[tuple[str, Tensor, list[str]]]:
    """(name, tensor, all its names) for each tensor. Tied parameters have several names."""
    names = parameter_names(model)
    return [(n, t, names.get(id(t), [n])) for n, t in _named_tensors(model)]


def _spellings(name: str, model: nn.Module) -> list[str]:
    """The names that a tensor may have in the files: without the prefixes that adapters add, with and without the prefix
    that a model with a head adds to its base model."""
    bare = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    prefix = f"{getattr(model, 'base_model_prefix', '') or '?'}."
    return [bare, bare.removeprefix(prefix), prefix + bare]


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


def _refuse_entry(name: str, entry: TensorEntry, tensor: Tensor) -> None:
    if entry.dtype not in LOADABLE:
        raise FullshardError(f"{entry.file}: {name} is {entry.dtype}; save it in bf16 or fp32 first")
    if entry.shape != tuple(tensor.shape):
        raise FullshardError(
            f"{entry.file}: {name} is {list(entry.shape)}, the model's is {list(tensor.shape)}: it holds another model"
        )


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
