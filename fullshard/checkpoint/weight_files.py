"""The safetensors files of a Hugging Face directory against the tensors of a model: refused before memory is allocated."""

from collections.abc import Collection, Sequence

from fullshard.base.errors import FullshardError, nearest
from fullshard.checkpoint.safetensors import SafetensorsDirectory
from fullshard.model.hf_directory import COMPUTED

FLOATS = ("F64", "F32", "F16", "BF16")


def refuse_dtype(files: SafetensorsDirectory, name: str, readable: Collection[str] = FLOATS) -> None:
    """Raise where a tensor of the files cannot be read as the model's."""
    if (entry := files.entries[name]).dtype not in readable:
        raise FullshardError(f"{entry.file}: {name} is {entry.dtype}; save it in bf16 or fp32 first")


def refuse_shape(files: SafetensorsDirectory, name: str, stored: Sequence[int], wanted: Sequence[int], made_of: str = "") -> None:
    """Raise where a tensor has another shape than the model's. `made_of`: the tensors of the files that it is made of."""
    if tuple(stored) != tuple(wanted):
        raise FullshardError(
            f"{files.entries[name].file}: {made_of or name} is {list(stored)}, the model's is {list(wanted)}: it holds another "
            "model"
        )


def refuse_missing(files: SafetensorsDirectory, missing: Sequence[str]) -> None:
    """Raise where the files lack tensors of the model."""
    if missing:
        known, first = list(files.entries), missing[0]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FullshardError(
            f"{files.directory} has no tensor for {first}{more}{nearest(first, known)} "
            f"(it has {len(known)}, for example {known[0] if known else 'none'}): it holds another model"
        )


def refuse_extra(files: SafetensorsDirectory, known: Collection[str]) -> None:
    """Raise where the files have tensors that the model lacks. `known`: the names that are the model's."""
    if extra := [n for n in files.entries if n not in known and not COMPUTED.search(n)]:
        more = f", and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise FullshardError(f"{files.directory} has {extra[0]}, which this model lacks{more}: it holds another model")
