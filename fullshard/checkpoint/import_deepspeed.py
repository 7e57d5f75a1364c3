"""Checkpoints of DeepSpeed: the fp32 masters of ZeRO 1 to 3, as `zero_to_fp32.py` would put them together."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fullshard.checkpoint.foreign_tensors import Foreign, as_name, as_shape, as_table, as_tensor, gathered, known_as
from fullshard.checkpoint.safetensors import is_count
from fullshard.checkpoint.torch_archive import Archive
from fullshard.checkpoint.torch_pickles import FileTensor
from fullshard.checkpoint.unpickler import Inert
from fullshard.checkpoint.writer import Source
from fullshard.errors import FullshardError

KIND = "ZeRO checkpoint that is known; convert it with its own zero_to_fp32.py"


def from_deepspeed(path: Path) -> Foreign:
    natural = lambda p: [int(t[:18]) if t.isdecimal() else t for t in re.split(r"(\d+)", p.name)]
    archives = [Archive(p) for p in sorted(path.glob("*_optim_states.pt"), key=natural)]
    ranks = len(archives)
    archives += [Archive(p) for p in sorted(path.glob("*_model_states.pt"), key=natural)]
    with known_as(path, KIND):
        optimizers = [as_table(as_table(a.load())["optimizer_state_dict"]) for a in archives[:ranks]]
        models = [as_table(a.load()) for a in archives[ranks:]]
        return gathered(_sources(path, optimizers, models), archives)


def _sources(path: Path, optimizers: Sequence[Mapping[Any, Any]], models: Sequence[Mapping[Any, Any]]) -> list[Source]:
    stage, count = _plain(optimizers[0]["zero_stage"]), optimizers[0]["partition_count"]
    count = max(count) if isinstance(count, list) else count
    if count != len(optimizers) or not models:
        said = count if is_count(count) else "an unknown number of"
        raise FullshardError(f"{path} has {len(optimizers)} of {said} *_optim_states.pt; give those of all ranks")
    found = [*_buffers(models), *(_zero3 if stage == 3 else _zero2)(path, optimizers, models)]
    known = {s.name: s for s in found}
    shared = as_table(models[0].get("shared_params") or {}).items()
    found += [Source(new, s.dtype, s.shape, s.read) for new, old in shared if (s := known.get(old))]
    for source in found:
        as_name(source.name, path)
    return found


def _plain(value: Any) -> Any:
    """An enum's value."""
    return value.args[0] if isinstance(value, Inert) else value


def _as_it_is(name: Any, value: Any) -> Source:
    tensor = as_tensor(value)
    return Source(name, tensor.dtype, tensor.shape, tensor.read)


def _buffers(models: Sequence[Mapping[Any, Any]]) -> list[Source]:
    return [_as_it_is(n, as_table(models[0]["module"])[n]) for n in models[0]["buffer_names"]]


def _zero2(path: Path, optimizers: Sequence[Any], models: Sequence[Any]) -> Iterator[Source]:
    """Each group is one vector, cut evenly over ranks; parameters lie in it one after the other."""
    yield from (_as_it_is(n, t) for n, t in as_table(models[0].get("frozen_param_fragments") or {}).items())
    paddings = optimizers[0].get("param_alignment_paddings")
    for group, shapes in enumerate(models[0]["param_shapes"]):
        parts = [_flat(o["single_partition_of_fp32_groups"][group]) for o in optimizers]
        at = 0
        for i, (name, shape) in enumerate(as_table(shapes).items()):
            numel = math.prod(as_shape(shape))
            yield Source(name, "F32", as_shape(shape), _spread(parts, at, numel))
            (padding,) = as_shape((paddings[group][i],)) if paddings else (0,)
            at += numel + padding
        _refuse_short(path, sum(p.numel for p in parts), at)


def _zero3(path: Path, optimizers: Sequence[Any], models: Sequence[Any]) -> Iterator[Source]:
    """Each parameter is cut evenly over ranks, padded; a rank's parts follow one another in its vectors."""
    for name, shape in as_table(models[0].get("frozen_param_shapes") or {}).items():
        parts = [as_tensor(m["frozen_param_fragments"][name]) for m in models]
        numel = math.prod(as_shape(shape))
        _refuse_short(path, sum(p.numel for p in parts), numel)
        yield Source(name, parts[0].dtype, as_shape(shape), _spread(parts, 0, numel))
    vectors = [_listed(o["fp32_flat_groups"]) for o in optimizers]
    at = 0
    for shapes in models[0]["param_shapes"]:
        for name, shape in as_table(shapes).items():
            numel = math.prod(as_shape(shape))
            share = -(-numel // len(optimizers))
            yield Source(name, "F32", as_shape(shape), partial(_zipped, vectors, at, share, numel))
            at += share
    _refuse_short(path, min(sum(p.numel for p in rank) for rank in vectors), at)


def _flat(value: Any) -> FileTensor:
    """A vector of fp32 numbers that follow one another."""
    tensor = as_tensor(value)
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.stride != (1,):
        raise TypeError("no vector")
    return tensor


def _listed(value: Any) -> list[FileTensor]:
    return [_flat(v) for v in value] if isinstance(value, list | tuple) else [_flat(value)]


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


def _zipped(vectors: Sequence[Sequence[FileTensor]], at: int, share: int, count: int) -> bytes:
    return b"".join(_spread(rank, at, share)() for rank in vectors)[: count * 4]


def _refuse_short(path: Path, have: int, need: int) -> None:
    if have < need:
        raise FullshardError(f"{path} has {have} of {need} elements of its parameters; fetch it again")
