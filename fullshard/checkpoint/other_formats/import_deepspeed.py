"""Imports DeepSpeed checkpoints: the fp32 masters of ZeRO 1 to 3, assembled as `zero_to_fp32.py` does."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.other_formats.external_checkpoint import (
    ExternalCheckpoint,
    as_name,
    as_shape,
    as_table,
    as_tensor,
    from_archives,
    refusing_malformed,
)
from fullshard.checkpoint.other_formats.torch_archive import Archive
from fullshard.checkpoint.other_formats.torch_pickles import FileTensor
from fullshard.checkpoint.other_formats.unpickler import Placeholder
from fullshard.checkpoint.safetensors import is_count
from fullshard.checkpoint.writer import TensorSource

KIND = "a ZeRO checkpoint of a known version; convert it with its own zero_to_fp32.py"


def from_deepspeed(path: Path) -> ExternalCheckpoint:
    by_number = lambda p: [int(t[:18]) if t.isdecimal() else t for t in re.split(r"(\d+)", p.name)]
    archives = [Archive(p) for p in sorted(path.glob("*_optim_states.pt"), key=by_number)]
    ranks = len(archives)
    archives += [Archive(p) for p in sorted(path.glob("*_model_states.pt"), key=by_number)]
    with refusing_malformed(path, KIND):
        optimizers = [as_table(as_table(a.load())["optimizer_state_dict"]) for a in archives[:ranks]]
        models = [as_table(a.load()) for a in archives[ranks:]]
        return from_archives(_sources(path, optimizers, models), archives)


def _sources(path: Path, optimizers: Sequence[Mapping[Any, Any]], models: Sequence[Mapping[Any, Any]]) -> list[TensorSource]:
    stage, count = _enum_value(optimizers[0]["zero_stage"]), optimizers[0]["partition_count"]
    count = max(count) if isinstance(count, list) else count
    if count != len(optimizers) or not models:
        expected = count if is_count(count) else "an unknown number of"
        raise FullshardError(f"{path} has {len(optimizers)} of {expected} *_optim_states.pt; give those of all ranks")
    sources = [*_buffers(models), *(_zero3 if stage == 3 else _zero2)(path, optimizers, models)]
    by_name = {s.name: s for s in sources}
    shared = as_table(models[0].get("shared_params") or {}).items()
    sources += [TensorSource(new, s.dtype, s.shape, s.read) for new, old in shared if (s := by_name.get(old))]
    for source in sources:
        as_name(source.name, path)
    return sources


def _enum_value(value: Any) -> Any:
    return value.args[0] if isinstance(value, Placeholder) else value


def _whole_tensor(name: Any, value: Any) -> TensorSource:
    tensor = as_tensor(value)
    return TensorSource(name, tensor.dtype, tensor.shape, tensor.read)


def _buffers(models: Sequence[Mapping[Any, Any]]) -> list[TensorSource]:
    return [_whole_tensor(n, as_table(models[0]["module"])[n]) for n in models[0]["buffer_names"]]


def _zero2(path: Path, optimizers: Sequence[Any], models: Sequence[Any]) -> Iterator[TensorSource]:
    """Stages 1 and 2: the parameters of a group follow one another in one vector, which is split evenly over ranks."""
    yield from (_whole_tensor(n, t) for n, t in as_table(models[0].get("frozen_param_fragments") or {}).items())
    paddings = optimizers[0].get("param_alignment_paddings")
    for group, shapes in enumerate(models[0]["param_shapes"]):
        parts = [_vector(o["single_partition_of_fp32_groups"][group]) for o in optimizers]
        at = 0
        for i, (name, shape) in enumerate(as_table(shapes).items()):
            numel = math.prod(as_shape(shape))
            yield TensorSource(name, "F32", as_shape(shape), partial(_read_elements, parts, at, numel))
            (padding,) = as_shape((paddings[group][i],)) if paddings else (0,)
            at += numel + padding
        _refuse_short(path, sum(p.numel for p in parts), at)


def _zero3(path: Path, optimizers: Sequence[Any], models: Sequence[Any]) -> Iterator[TensorSource]:
    """Stage 3: each parameter is padded and split evenly over ranks. A rank's parts follow one another in its vectors."""
    for name, shape in as_table(models[0].get("frozen_param_shapes") or {}).items():
        parts = [as_tensor(m["frozen_param_fragments"][name]) for m in models]
        numel = math.prod(as_shape(shape))
        _refuse_short(path, sum(p.numel for p in parts), numel)
        yield TensorSource(name, parts[0].dtype, as_shape(shape), partial(_read_elements, parts, 0, numel))
    vectors = [_vectors(o["fp32_flat_groups"]) for o in optimizers]
    at = 0
    for shapes in models[0]["param_shapes"]:
        for name, shape in as_table(shapes).items():
            numel = math.prod(as_shape(shape))
            share = -(-numel // len(optimizers))
            yield TensorSource(name, "F32", as_shape(shape), partial(_read_from_ranks, vectors, at, share, numel))
            at += share
    _refuse_short(path, min(sum(p.numel for p in rank) for rank in vectors), at)


def _vector(value: Any) -> FileTensor:
    """A contiguous one-dimensional fp32 tensor."""
    tensor = as_tensor(value)
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.stride != (1,):
        raise TypeError("not a vector")
    return tensor


def _vectors(value: Any) -> list[FileTensor]:
    return [_vector(v) for v in value] if isinstance(value, list | tuple) else [_vector(value)]


def _read_elements(vectors: Sequence[FileTensor], first: int, count: int) -> bytes:
    """The bytes of `count` elements from `first` on, of vectors that follow one another."""
    pieces, start = [], 0
    for vector in vectors:
        low, high = max(first, start), min(first + count, start + vector.numel)
        if low < high:
            pieces.append(vector.part(low - start, high - low))
        start += vector.numel
    return b"".join(pieces)


def _read_from_ranks(vectors: Sequence[Sequence[FileTensor]], first: int, share: int, count: int) -> bytes:
    """The bytes of a parameter of `count` elements, of which every rank's vectors hold `share` from `first` on."""
    return b"".join(_read_elements(rank, first, share) for rank in vectors)[: count * 4]


def _refuse_short(path: Path, have: int, need: int) -> None:
    if have < need:
        raise FullshardError(f"{path} has {have} of {need} elements of its parameters; fetch it again")
