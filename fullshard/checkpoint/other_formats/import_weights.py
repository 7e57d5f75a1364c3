"""Imports weights from other programs' checkpoints, a tensor at a time: `.pt` files, `.pt` files of each rank, DCP
directories, DeepSpeed ZeRO, Hugging Face safetensors, Orbax. Nothing in them is executed (see `unpickler`)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.base.errors import FullshardError
from fullshard.base.untrusted_files import quoted, read_small, refusing_os_errors
from fullshard.checkpoint.directories import Local, Place
from fullshard.checkpoint.other_formats.external_checkpoint import (
    ExternalCheckpoint,
    as_name,
    as_shape,
    as_tensor,
    file_inside,
    from_archives,
    refuse_oversized,
    refusing_malformed,
)
from fullshard.checkpoint.other_formats.import_dcp import from_dcp
from fullshard.checkpoint.other_formats.import_deepspeed import from_deepspeed
from fullshard.checkpoint.other_formats.import_orbax import find_orbax, from_orbax
from fullshard.checkpoint.other_formats.torch_archive import Archive
from fullshard.checkpoint.other_formats.torch_pickles import FileTensor
from fullshard.checkpoint.other_formats.unpickler import Placeholder
from fullshard.checkpoint.safetensors import ITEM_BYTES, SafetensorsDirectory, is_count
from fullshard.checkpoint.writer import TensorSource, write_checkpoint

# What wrappers add to names: DDP and DeepSpeed, FSDP1, compile, activation checkpointing.
WRAPPERS = re.compile(r"(^|(?<=\.))(module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
MODEL_PREFIXES = ("model", "state_dict", "model_state_dict", "app.model", "module")
OPTIMIZER_PREFIXES = ("optimizer", "optim", "optimizer_state_dict", "app.optimizer", "optimizer_states")
DEEPEST = 50  # levels of nested tables
MOST_VISITED = 64  # table entries per byte of a pickle: a table can hold itself, or one table many times
REBUILT = re.compile(r"torch\.(_utils|_tensor)\._rebuild_\w+")


def import_weights(source: str, checkpoint_dir: Local, step: int = 0, prefix: str = "") -> Place:
    """Write a checkpoint of the weights at `source`, without optimizer state. `prefix`: what the names of weights begin
    with there; it is cut off. The manifest's `state` lists files without checksums as `unchecked`."""
    if not is_count(step):
        raise FullshardError(f"--step is a number of steps, not {step}")
    with refusing_os_errors(f"import {source}"):
        external = read_external(Path(source))
        kept = _select_weights(external.sources, prefix or external.prefix)
        refuse_oversized(source, replace(external, sources=kept))
        sources = [TensorSource(f"model.{s.name}", s.dtype, s.shape, s.read) for s in kept]
        names = [s.name for s in sources]
        if len(set(names)) != len(names):
            raise FullshardError(f"{source} has two tensors of one name once wrappers are cut off; give --prefix")
        state: dict[str, Any] = {"imported": Path(source).name, "without_slots": "all", "extra": {}}
        state |= {"unchecked": list(external.unchecked)} if external.unchecked else {}
        return write_checkpoint(checkpoint_dir, sources, step=step, state=state)


def _select_weights(sources: Sequence[TensorSource], prefix: str) -> list[TensorSource]:
    """The model's tensors, under the names of the model without wrappers."""
    names = [s.name for s in sources]
    if not prefix and any(n.startswith(tuple(f"{p}." for p in OPTIMIZER_PREFIXES)) for n in names):
        prefix = next((f"{p}." for p in MODEL_PREFIXES if any(n.startswith(f"{p}.") for n in names)), "")
        if not prefix:
            raise FullshardError(
                f"cannot tell weights from optimizer state; give --prefix, the start of the weights' names, as in {names[0]}"
            )
    kept = [(s, s.name.removeprefix(prefix)) for s in sources if s.name.startswith(prefix)]
    if not kept:
        raise FullshardError(f"no tensor's name begins with {prefix!r}; there are, for example, {', '.join(names[:3])}")
    return [TensorSource(WRAPPERS.sub("", name), s.dtype, s.shape, s.read) for s, name in kept]


def read_external(path: Path) -> ExternalCheckpoint:
    """The tensors of a file or directory in any of the known formats."""
    if path.is_file():
        return from_torch([path])
    if not path.is_dir():
        raise FullshardError(f"{path} is neither a file nor a directory" if path.exists() else f"there is no {path}")
    if (path / ".metadata").exists():
        return from_dcp(path)
    if (path / "latest").exists():
        path = file_inside(path, read_small(path / "latest", 4096).decode(errors="replace").strip())
    if any(path.glob("*_optim_states.pt")):
        return from_deepspeed(path)
    if any(path.glob("*.safetensors")):
        return from_safetensors(path)
    if files := _rank_files(path):
        return from_torch(files)
    if tree := find_orbax(path):
        return from_orbax(tree)
    raise FullshardError(f"{path} has no checkpoint of DCP, DeepSpeed, Hugging Face or Orbax, and no .pt files")


def _rank_files(path: Path) -> list[Path]:
    """SafetensorsDirectory that differ in a number, in its order; those of optimizers are left out."""
    files = [p for p in path.glob("*.pt") if not re.search(r"optim|metadata", p.name)]
    number = lambda p: int((re.findall(r"\d+", p.stem) or ["0"])[-1])
    return sorted(files, key=number)


def from_safetensors(path: Path) -> ExternalCheckpoint:
    files = SafetensorsDirectory(path)

    def read(name: str) -> bytearray:
        entry = files.entries[name]
        data = bytearray(entry.nbytes)
        files.read(name, [(0, n) for n in entry.shape], memoryview(data))
        return data

    sources = [TensorSource(n, e.dtype, e.shape, partial(read, n)) for n, e in files.entries.items()]
    return ExternalCheckpoint(sources, frozenset(e.file for e in files.entries.values()))


# -- torch.save ---------------------------------------------------------------------------------------------


def tensors_by_name(archive: Archive) -> dict[str, Any]:
    """The tensors of a nested state dict by dotted name; other values are left out. DTensors are placeholders."""
    budget = [MOST_VISITED * archive.members["data.pkl"].file_size]
    return dict(_walk(archive.load(), "", 0, budget, archive.path))


def _walk(tree: Any, prefix: str, depth: int, budget: list[int], path: Path) -> Iterator[tuple[str, Any]]:
    """Tensors of nested tables by dotted path. `budget`: how much the walk may still visit."""
    budget[0] -= 1 + len(prefix)
    if budget[0] < 0 or depth > DEEPEST:
        raise FullshardError(f"{path} holds tables that hold themselves, or one table many times; save the state dict alone")
    if isinstance(tree, FileTensor) or (isinstance(tree, Placeholder) and REBUILT.fullmatch(tree.path)):
        yield as_name(prefix or "tensor", path), tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            word = str(key) if isinstance(key, str | int | float) else "\0"  # `as_name` refuses it
            yield from _walk(value, f"{prefix}.{word}" if prefix else word, depth + 1, budget, path)


def from_torch(files: Sequence[Path]) -> ExternalCheckpoint:
    """The tensors of one `torch.save` file, or of one for each rank."""
    archives = [Archive(f) for f in files]
    ranks = [tensors_by_name(a) for a in archives]
    if not ranks[0]:
        raise FullshardError(f"{files[0]} holds no tensors")
    for file, tensors in zip(files[1:], ranks[1:], strict=True):
        if tensors.keys() != ranks[0].keys():
            raise FullshardError(f"{file} and {files[0]} hold different tensors; give the files of one model")
    sources = [_source(name, [r[name] for r in ranks], files[0]) for name in ranks[0]]
    return from_archives(sources, archives)


def _source(name: str, parts: Sequence[Any], path: Path) -> TensorSource:
    if isinstance(parts[0], FileTensor):
        return _plain_tensor(name, parts)
    if not all(isinstance(p, Placeholder) and _is_dtensor(p) for p in parts):
        why = f"{path}: {name} is sharded in some files and not in others, or of an unknown class"
        return TensorSource(name, "U8", (), partial(_refuse, why))  # an error only if it is one of the weights
    kind = f"a file of sharded tensors in a known version ({name}); save it with torch.distributed.checkpoint"
    with refusing_malformed(path, kind):
        return _joined(name, parts)


def _refuse(why: str) -> bytes:
    raise FullshardError(f"{why}; convert it to a plain tensor, and save it again")


def _plain_tensor(name: str, parts: Sequence[Any]) -> TensorSource:
    if len(parts) > 1:
        raise FullshardError(
            f"{name} is a plain tensor on every rank, and nothing says how it is split; save a full or sharded state dict"
        )
    return TensorSource(name, parts[0].dtype, parts[0].shape, parts[0].read)


def _is_dtensor(placeholder: Placeholder) -> bool:
    args = placeholder.args
    kind = args[1] if placeholder.path == "torch._tensor._rebuild_from_type_v2" and len(args) > 1 else None
    return str(getattr(kind, "path", "")).endswith(".DTensor")


def _joined(name: str, parts: Sequence[Placeholder]) -> TensorSource:
    """A whole tensor from the ranks' DTensors, which are sharded along one dim or replicated."""
    shape = as_shape(parts[0].args[2][2])
    local = [as_tensor(_attribute(p.args[3], "_local_tensor")) for p in parts]
    placements = _attribute(_attribute(parts[0].args[3], "_spec").state, "placements")
    if len(placements) != 1 or not isinstance(placements[0], Placeholder):
        raise FullshardError(f"{name} is on a mesh of {len(placements)} axes; save it with torch.distributed.checkpoint")
    dim = _attribute(placements[0].state, "dim")
    dim = next(iter(placements[0].args), None) if dim is None else dim
    if placements[0].path.endswith("Replicate") and local[0].shape == shape:
        return TensorSource(name, local[0].dtype, shape, local[0].read)
    if not isinstance(dim, int) or not 0 <= dim < len(shape):
        raise FullshardError(f"{name} has an unknown placement: {quoted(placements[0].path)}")
    filled = [t for t in local if t.numel]
    if sum(t.shape[dim] for t in filled) != (shape[dim] if filled else 0):
        raise FullshardError(f"{name}: {len(parts)} files hold only a part of it; give those of all ranks")
    if any((*t.shape[:dim], *t.shape[dim + 1 :], t.dtype) != (*shape[:dim], *shape[dim + 1 :], local[0].dtype) for t in filled):
        raise FullshardError(f"{name} has parts of different shapes or dtypes; give the files of one model")
    return TensorSource(name, local[0].dtype, shape, partial(_concatenate, filled, dim))


def _attribute(state: Any, name: str) -> Any:
    """An attribute of a pickled object. `state` holds its attributes, or a pair of attributes and slots."""
    tables = state[:2] if isinstance(state, tuple) else (state,)
    return next((table[name] for table in tables if isinstance(table, Mapping) and name in table), None)


def _concatenate(parts: Sequence[FileTensor], dim: int) -> bytes:
    if not parts:
        return b""
    item = f"V{ITEM_BYTES[parts[0].dtype]}"
    return np.concatenate([np.frombuffer(p.read(), dtype=item).reshape(p.shape) for p in parts], axis=dim).tobytes()
