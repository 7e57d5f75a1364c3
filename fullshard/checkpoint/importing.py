"""Checkpoints of others, turned into ours a tensor at a time: `.pt` files, per-rank `.pt` files, DCP directories,
DeepSpeed ZeRO, Hugging Face safetensors. Nothing in them is executed (see `pickles`)."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.checkpoint.pickles import Archive, FileTensor, Inert, unpickle
from fullshard.checkpoint.place import Local, Place
from fullshard.checkpoint.safetensors import ITEM_BYTES, Files
from fullshard.checkpoint.writer import Source, write_checkpoint
from fullshard.errors import FullshardError

# What wrappers put into names: DDP and DeepSpeed, FSDP1, compile, activation checkpointing.
WRAPPERS = re.compile(r"(^|(?<=\.))(module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
ROOTS = ("model", "state_dict", "model_state_dict", "app.model", "module")
OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "app.optimizer", "optimizer_states")


def import_weights(source: str, shelf: Local, step: int = 0, prefix: str = "") -> Place:
    """Write a checkpoint of the weights that lie at `source`; it has no optimizer state."""
    found = read_foreign(Path(source))
    kept = _chosen(found, prefix)
    sources = [Source(f"model.{s.name}", s.dtype, s.shape, s.read) for s in kept]
    names = [s.name for s in sources]
    if len(set(names)) != len(names):
        raise FullshardError(f"{source} has several tensors of one name once wrappers are cut off; give --prefix")
    state = {"imported": Path(source).name, "without_slots": "all", "extra": {}}
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


def read_foreign(path: Path) -> list[Source]:
    """The tensors of a file or directory of any known kind."""
    if path.is_file():
        return from_torch([path])
    if not path.is_dir():
        raise FullshardError(f"there is no {path}")
    if (path / ".metadata").is_file():
        return from_dcp(path)
    if latest := sorted(path.glob("latest")):
        path = _below(path, latest[0].read_text().strip())
    if any(path.glob("*_optim_states.pt")):
        return from_deepspeed(path)
    if any(path.glob("*.safetensors")):
        return from_safetensors(path)
    if files := _rank_files(path):
        return from_torch(files)
    raise FullshardError(f"{path} is neither DCP, DeepSpeed, Hugging Face nor .pt files")


def _below(path: Path, name: str) -> Path:
    """A file that `path` names must lie in it."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        raise FullshardError(f"{path} names {name!r}, which does not lie in it; it is not read")
    return path / name


def _rank_files(path: Path) -> list[Path]:
    """Files that differ in a number, in its order; those of optimizers are left out."""
    files = [p for p in path.glob("*.pt") if not re.search(r"optim|metadata", p.name)]
    number = lambda p: int((re.findall(r"\d+", p.stem) or ["0"])[-1])
    return sorted(files, key=number)


def from_safetensors(path: Path) -> list[Source]:
    files = Files(path)

    def read(name: str) -> bytearray:
        entry = files.entries[name]
        data = bytearray(math.prod(entry.shape) * entry.item_bytes)
        files.read(name, [(0, n) for n in entry.shape], memoryview(data))
        return data

    return [Source(n, e.dtype, e.shape, partial(read, n)) for n, e in files.entries.items()]


# -- torch.save ---------------------------------------------------------------------------------------------


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Tensors, and sharded ones, by dotted name; the rest is left out."""
    if isinstance(tree, FileTensor) or (isinstance(tree, Inert) and _is_dtensor(tree)):
        return {prefix: tree}
    if not isinstance(tree, Mapping):
        return {}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def from_torch(files: Sequence[Path]) -> list[Source]:
    """One file of `torch.save`, or one for each rank."""
    ranks = [flat(Archive(f).load()) for f in files]
    if not ranks[0]:
        raise FullshardError(f"{files[0]} holds no tensors")
    for file, found in zip(files[1:], ranks[1:], strict=True):
        if found.keys() != ranks[0].keys():
            raise FullshardError(f"{file} holds other tensors than {files[0]}; give the files of one model")
    sources = []
    for name in ranks[0]:
        parts = [r[name] for r in ranks]
        sources.append(_whole(name, parts) if isinstance(parts[0], FileTensor) else _joined(name, parts))
    return sources


def _whole(name: str, parts: Sequence[FileTensor]) -> Source:
    if len(parts) > 1:
        raise FullshardError(f"{name} is on every rank, and nothing says how it is cut; save a full or sharded state dict")
    return Source(name, parts[0].dtype, parts[0].shape, parts[0].read)


def _is_dtensor(made: Inert) -> bool:
    return made.path == "torch._tensor._rebuild_from_type_v2" and getattr(made.args[1], "path", "").endswith(".DTensor")


def _joined(name: str, parts: Sequence[Any]) -> Source:
    """A DTensor from the ranks' parts of it: cut along one dim, or whole on each."""
    if not all(isinstance(p, Inert) for p in parts):
        raise FullshardError(f"{name} is sharded in some files and not in others")
    shape = tuple(parts[0].args[2][2])
    held = [_merged(p.args[3]) for p in parts]
    local = [h["_local_tensor"] for h in held]
    placements = _merged(held[0]["_spec"].state).get("placements", ())
    if len(placements) != 1 or not isinstance(placements[0], Inert):
        raise FullshardError(f"{name} lies on a mesh of {len(placements)} axes; save it with torch.distributed.checkpoint")
    dim = _merged(placements[0].state).get("dim", next(iter(placements[0].args), None))
    if placements[0].path.endswith("Replicate"):
        return Source(name, local[0].dtype, shape, local[0].read)
    if not isinstance(dim, int) or not 0 <= dim < len(shape):
        raise FullshardError(f"{name} is cut in a way that is not known: {placements[0].path}")
    if sum(t.shape[dim] for t in local) != shape[dim]:
        raise FullshardError(f"{name}: {len(parts)} files hold only a part of it; give those of all ranks")
    return Source(name, local[0].dtype, shape, partial(_concatenate, local, dim))


def _merged(state: Any) -> dict[str, Any]:
    """What pickle keeps of an object: its attributes, its slots, or both."""
    tables = state if isinstance(state, tuple) else (state,)
    return {k: v for table in tables if isinstance(table, Mapping) for k, v in table.items()}


def _concatenate(parts: Sequence[FileTensor], dim: int) -> bytes:
    item = f"V{ITEM_BYTES[parts[0].dtype]}"
    arrays = [np.frombuffer(p.read(), dtype=item).reshape(p.shape) for p in parts if p.numel]
    return np.concatenate(arrays, axis=dim).tobytes()


# -- torch.distributed.checkpoint ---------------------------------------------------------------------------


def from_dcp(path: Path) -> list[Source]:
    """Its metadata is a pickle, and every chunk a file of `torch.save` inside a larger one."""
    with (path / ".metadata").open("rb") as file:
        metadata = unpickle(file, str(path / ".metadata"))
    try:
        where = {(k.state["fqn"], tuple(k.state.get("offset") or ())): v for k, v in metadata.state["storage_data"].items()}
        found = {
            n: m.state for n, m in metadata.state["state_dict_metadata"].items() if m.path.endswith(".TensorStorageMetadata")
        }
        tensors = {n: (tuple(m["size"]), m["properties"].state[0], [_box(c) for c in m["chunks"]]) for n, m in found.items()}
    except (AttributeError, KeyError, TypeError, IndexError):
        raise FullshardError(f"{path / '.metadata'} is of a kind that is not known; save it again with a newer torch") from None
    return [
        Source(name, dtype, shape, partial(_dcp_tensor, path, name, shape, dtype, boxes, where))
        for name, (shape, dtype, boxes) in tensors.items()
    ]


def _box(chunk: Inert) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])


def _dcp_tensor(path: Path, name: str, shape: tuple[int, ...], dtype: str, chunks: Any, where: Any) -> bytes:
    whole = np.zeros(shape, dtype=f"V{ITEM_BYTES[dtype]}")
    seen = 0
    for offsets, sizes in chunks:
        info = where[(name, offsets)].state
        if info.get("transform_descriptors"):
            raise FullshardError(f"{path} is compressed; save it again without extensions")
        part = Archive(_below(path, info["relative_path"]), info["offset"], info["length"]).load()
        if not isinstance(part, FileTensor) or part.shape != sizes or part.dtype != dtype:
            raise FullshardError(f"{path}: a chunk of {name} is not what the metadata says")
        target = whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
        if target.shape != sizes:
            raise FullshardError(f"{path}: a chunk of {name} lies outside it")
        target[...] = np.frombuffer(part.read(), dtype=whole.dtype).reshape(sizes)
        seen += part.numel
    if seen != whole.size:
        raise FullshardError(f"{path}: the chunks of {name} do not add up to it")
    return whole.tobytes()


# -- DeepSpeed ----------------------------------------------------------------------------------------------


def from_deepspeed(path: Path) -> list[Source]:
    """The fp32 masters of ZeRO 1 to 3, as `zero_to_fp32.py` would put them together."""
    natural = lambda p: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", p.name)]
    optimizers = [Archive(p).load()["optimizer_state_dict"] for p in sorted(path.glob("*_optim_states.pt"), key=natural)]
    models = [Archive(p).load() for p in sorted(path.glob("*_model_states.pt"), key=natural)]
    try:
        stage, count = _plain(optimizers[0]["zero_stage"]), optimizers[0]["partition_count"]
        count = max(count) if isinstance(count, list) else count
        if count != len(optimizers) or not models:
            raise FullshardError(f"{path} has {len(optimizers)} of {count} *_optim_states.pt; give those of all ranks")
        make = _zero3 if stage == 3 else _zero2
        found = make(path, optimizers, models)
    except (KeyError, TypeError, AttributeError, IndexError):
        raise FullshardError(f"{path} is no ZeRO checkpoint that is known; convert it with its own zero_to_fp32.py") from None
    known = {s.name: s for s in found}
    found += [Source(new, known[old].dtype, known[old].shape, known[old].read)
              for new, old in models[0].get("shared_params", {}).items() if old in known]  # fmt: skip
    return found


def _plain(value: Any) -> Any:
    """An enum's value."""
    return value.args[0] if isinstance(value, Inert) else value


def _buffers(models: Sequence[Any]) -> list[Source]:
    held = [(n, models[0]["module"][n]) for n in models[0]["buffer_names"]]
    return [Source(n, t.dtype, t.shape, t.read) for n, t in held]


def _zero2(path: Path, optimizers: Sequence[Any], models: Sequence[Any]) -> list[Source]:
    """Each group is one vector, cut evenly over ranks; parameters lie in it one after the other."""
    found = _buffers(models)
    found += [Source(n, t.dtype, t.shape, t.read) for n, t in (models[0].get("frozen_param_fragments") or {}).items()]
    paddings = optimizers[0].get("param_alignment_paddings")
    for group, shapes in enumerate(models[0]["param_shapes"]):
        parts = [o["single_partition_of_fp32_groups"][group] for o in optimizers]
        at = 0
        for i, (name, shape) in enumerate(shapes.items()):
            numel = math.prod(shape)
            found.append(Source(name, "F32", tuple(shape), _spread(parts, at, numel)))
            at += numel + (paddings[group][i] if paddings else 0)
        _refuse_short(path, sum(p.numel for p in parts), at)
    return found


def _spread(parts: Sequence[FileTensor], first: int, count: int) -> Callable[[], bytes]:
    """Elements of vectors that follow one another."""

    def read() -> bytes:
        pieces, start = [], 0
        for part in parts:
            low, high = max(first, start), min(first + count, start + part.numel)
            if low < high:
                pieces.append(part.part(low - start, high - low))
            start += part.numel
        return b"".join(pieces)

    return read


def _zero3(path: Path, optimizers: Sequence[Any], models: Sequence[Any]) -> list[Source]:
    """Each parameter is cut evenly over ranks, padded; a rank's parts follow one another in its vectors."""
    ranks = len(optimizers)
    found = _buffers(models)
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [m["frozen_param_fragments"][name] for m in models]
        found.append(Source(name, parts[0].dtype, tuple(shape), _spread(parts, 0, math.prod(shape))))
    vectors = [_listed(o["fp32_flat_groups"]) for o in optimizers]
    at = 0
    for shapes in models[0]["param_shapes"]:
        for name, shape in shapes.items():
            share = -(-math.prod(shape) // ranks)
            found.append(Source(name, "F32", tuple(shape), _zipped(vectors, at, share, math.prod(shape))))
            at += share
    _refuse_short(path, sum(p.numel for p in vectors[0]), at)
    return found


def _listed(value: Any) -> list[FileTensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _zipped(vectors: Sequence[Sequence[FileTensor]], at: int, share: int, count: int) -> Callable[[], bytes]:
    return lambda: b"".join(_spread(rank, at, share)() for rank in vectors)[: count * 4]


def _refuse_short(path: Path, have: int, need: int) -> None:
    if have < need:
        raise FullshardError(f"{path} has {have} of {need} elements of its parameters; fetch it again")
