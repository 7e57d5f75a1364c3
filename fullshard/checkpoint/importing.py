"""Checkpoints of others, turned into ours a tensor at a time: `.pt` files, per-rank `.pt` files, DCP directories,
DeepSpeed ZeRO, Hugging Face safetensors. Nothing in them is executed (see `unpickler`)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.checkpoint.foreign_tensors import Foreign, as_name, as_shape, as_tensor, below, gathered, known_as, refuse_inflated
from fullshard.checkpoint.import_dcp import from_dcp
from fullshard.checkpoint.import_deepspeed import from_deepspeed
from fullshard.checkpoint.place import Local, Place
from fullshard.checkpoint.safetensors import ITEM_BYTES, Files, is_count
from fullshard.checkpoint.torch_archive import Archive
from fullshard.checkpoint.torch_pickles import FileTensor
from fullshard.checkpoint.unpickler import Inert
from fullshard.checkpoint.untrusted_files import quoted, read_small, refusing
from fullshard.checkpoint.writer import Source, write_checkpoint
from fullshard.errors import FullshardError

# What wrappers put into names: DDP and DeepSpeed, FSDP1, compile, activation checkpointing.
WRAPPERS = re.compile(r"(^|(?<=\.))(module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
ROOTS = ("model", "state_dict", "model_state_dict", "app.model", "module")
OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "app.optimizer", "optimizer_states")
DEEPEST = 50  # tables inside each other
MOST_VISITED = 64  # entries of tables, for each byte of a pickle: a table may hold itself, or one table many times
REBUILT = re.compile(r"torch\.(_utils|_tensor)\._rebuild_\w+")


def import_weights(source: str, shelf: Local, step: int = 0, prefix: str = "") -> Place:
    """Write a checkpoint of the weights that lie at `source`; it has no optimizer state. The manifest's state lists the
    files that carried no checksums as `unchecked`."""
    if not is_count(step):
        raise FullshardError(f"--step is a number of steps, not {step}")
    with refusing(f"import {source}"):
        found = read_foreign(Path(source))
        kept = _chosen(found.sources, prefix)
        refuse_inflated(source, Foreign(kept, found.files))
        sources = [Source(f"model.{s.name}", s.dtype, s.shape, s.read) for s in kept]
        names = [s.name for s in sources]
        if len(set(names)) != len(names):
            raise FullshardError(f"{source} has several tensors of one name once wrappers are cut off; give --prefix")
        state: dict[str, Any] = {"imported": Path(source).name, "without_slots": "all", "extra": {}}
        state |= {"unchecked": list(found.unchecked)} if found.unchecked else {}
        return write_checkpoint(shelf, sources, step=step, state=state)


def _chosen(found: Sequence[Source], prefix: str) -> list[Source]:
    """The model's tensors, under the names that the bare model has."""
    names = [s.name for s in found]
    if not prefix and any(n.startswith(tuple(f"{o}." for o in OPTIMIZERS)) for n in names):
        prefix = next((f"{r}." for r in ROOTS if any(n.startswith(f"{r}.") for n in names)), "")
        if not prefix:
            raise FullshardError(f"weights and optimizer lie side by side; give --prefix, what weights begin with: {names[0]}")
    kept = [(s, s.name.removeprefix(prefix)) for s in found if s.name.startswith(prefix)]
    if not kept:
        raise FullshardError(f"no tensor's name begins with {prefix!r}; they are called, for example, {', '.join(names[:3])}")
    return [Source(WRAPPERS.sub("", name), s.dtype, s.shape, s.read) for s, name in kept]


def read_foreign(path: Path) -> Foreign:
    """The tensors of a file or directory of any known kind."""
    if path.is_file():
        return from_torch([path])
    if not path.is_dir():
        raise FullshardError(f"{path} is neither a file nor a directory" if path.exists() else f"there is no {path}")
    if (path / ".metadata").exists():
        return from_dcp(path)
    if (path / "latest").exists():
        path = below(path, read_small(path / "latest", 4096).decode(errors="replace").strip())
    if any(path.glob("*_optim_states.pt")):
        return from_deepspeed(path)
    if any(path.glob("*.safetensors")):
        return from_safetensors(path)
    if files := _rank_files(path):
        return from_torch(files)
    raise FullshardError(f"{path} is neither DCP, DeepSpeed, Hugging Face nor .pt files")


def _rank_files(path: Path) -> list[Path]:
    """Files that differ in a number, in its order; those of optimizers are left out."""
    files = [p for p in path.glob("*.pt") if not re.search(r"optim|metadata", p.name)]
    number = lambda p: int((re.findall(r"\d+", p.stem) or ["0"])[-1])
    return sorted(files, key=number)


def from_safetensors(path: Path) -> Foreign:
    files = Files(path)

    def read(name: str) -> bytearray:
        entry = files.entries[name]
        data = bytearray(entry.nbytes)
        files.read(name, [(0, n) for n in entry.shape], memoryview(data))
        return data

    sources = [Source(n, e.dtype, e.shape, partial(read, n)) for n, e in files.entries.items()]
    return Foreign(sources, frozenset(e.file for e in files.entries.values()))


# -- torch.save ---------------------------------------------------------------------------------------------


def flat(archive: Archive) -> dict[str, Any]:
    """Tensors, and sharded ones, by dotted name; the rest is left out."""
    left = [MOST_VISITED * archive.members["data.pkl"].file_size]
    return dict(_flat(archive.load(), "", 0, left, archive.path))


def _flat(tree: Any, prefix: str, depth: int, left: list[int], path: Path) -> Iterator[tuple[str, Any]]:
    left[0] -= 1 + len(prefix)
    if left[0] < 0 or depth > DEEPEST:
        raise FullshardError(f"{path} holds tables that hold themselves, or one table many times; save the state dict alone")
    if isinstance(tree, FileTensor) or (isinstance(tree, Inert) and REBUILT.fullmatch(tree.path)):
        yield as_name(prefix or "tensor", path), tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            word = str(key) if isinstance(key, str | int | float) else "\0"  # which no name of a tensor has
            yield from _flat(value, f"{prefix}.{word}" if prefix else word, depth + 1, left, path)


def from_torch(files: Sequence[Path]) -> Foreign:
    """One file of `torch.save`, or one for each rank."""
    archives = [Archive(f) for f in files]
    ranks = [flat(a) for a in archives]
    if not ranks[0]:
        raise FullshardError(f"{files[0]} holds no tensors")
    for file, found in zip(files[1:], ranks[1:], strict=True):
        if found.keys() != ranks[0].keys():
            raise FullshardError(f"{file} holds other tensors than {files[0]}; give the files of one model")
    sources = [_source(name, [r[name] for r in ranks], files[0]) for name in ranks[0]]
    return gathered(sources, archives)


def _source(name: str, parts: Sequence[Any], path: Path) -> Source:
    if isinstance(parts[0], FileTensor):
        return _whole(name, parts)
    if not all(isinstance(p, Inert) and _is_dtensor(p) for p in parts):
        refuse = partial(_refuse_kind, f"{path}: {name} is sharded in some files and not in others, or of an unknown kind")
        return Source(name, "U8", (), refuse)  # refused only if it is one of the weights
    with known_as(path, f"file of sharded tensors that is known ({name}); save it with torch.distributed.checkpoint"):
        return _joined(name, parts)


def _refuse_kind(why: str) -> bytes:
    raise FullshardError(f"{why}; convert it to a plain tensor, and save it again")


def _whole(name: str, parts: Sequence[Any]) -> Source:
    if len(parts) > 1:
        raise FullshardError(f"{name} is on every rank, and nothing says how it is cut; save a full or sharded state dict")
    return Source(name, parts[0].dtype, parts[0].shape, parts[0].read)


def _is_dtensor(made: Inert) -> bool:
    kind = made.args[1] if made.path == "torch._tensor._rebuild_from_type_v2" and len(made.args) > 1 else None
    return str(getattr(kind, "path", "")).endswith(".DTensor")


def _joined(name: str, parts: Sequence[Inert]) -> Source:
    """A DTensor from the ranks' parts of it: cut along one dim, or whole on each."""
    shape = as_shape(parts[0].args[2][2])
    local = [as_tensor(_attribute(p.args[3], "_local_tensor")) for p in parts]
    placements = _attribute(_attribute(parts[0].args[3], "_spec").state, "placements")
    if len(placements) != 1 or not isinstance(placements[0], Inert):
        raise FullshardError(f"{name} lies on a mesh of {len(placements)} axes; save it with torch.distributed.checkpoint")
    dim = _attribute(placements[0].state, "dim")
    dim = next(iter(placements[0].args), None) if dim is None else dim
    if placements[0].path.endswith("Replicate") and local[0].shape == shape:
        return Source(name, local[0].dtype, shape, local[0].read)
    if not isinstance(dim, int) or not 0 <= dim < len(shape):
        raise FullshardError(f"{name} is cut in a way that is not known: {quoted(placements[0].path)}")
    filled = [t for t in local if t.numel]
    if sum(t.shape[dim] for t in filled) != (shape[dim] if filled else 0):
        raise FullshardError(f"{name}: {len(parts)} files hold only a part of it; give those of all ranks")
    if any((*t.shape[:dim], *t.shape[dim + 1 :], t.dtype) != (*shape[:dim], *shape[dim + 1 :], local[0].dtype) for t in filled):
        raise FullshardError(f"{name} has parts of different kinds; give the files of one model")
    return Source(name, local[0].dtype, shape, partial(_concatenate, filled, dim))


def _attribute(state: Any, name: str) -> Any:
    """Of what pickle keeps of an object: its attributes, its slots, or both."""
    tables = state[:2] if isinstance(state, tuple) else (state,)
    return next((table[name] for table in tables if isinstance(table, Mapping) and name in table), None)


def _concatenate(parts: Sequence[FileTensor], dim: int) -> bytes:
    if not parts:
        return b""
    item = f"V{ITEM_BYTES[parts[0].dtype]}"
    return np.concatenate([np.frombuffer(p.read(), dtype=item).reshape(p.shape) for p in parts], axis=dim).tobytes()
