"""Collectives in a torch trace: their kind, bytes and ranks, from NCCL's kernels or from torch's operators over gloo."""

import math
from typing import Any

from fullshard.observe.profile.rank_trace import SpanKind

Event = dict[str, Any]
WORDS: dict[str, SpanKind] = {  # in names of NCCL's kernels, of its collectives and of torch's operators
    "allgather": "gather",
    "reducescatter": "reduce",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "sendrecv": "all_to_all",
}
SIZES = {
    **{"float": 4, "double": 8, "int": 4, "long": 8, "long int": 8, "half": 2, "bfloat16": 2, "bool": 1, "byte": 1, "char": 1},
    **{"signed char": 1, "unsigned char": 1, "float8_e4m3fn": 1, "float8_e5m2": 1},
}


def kind_of(name: str) -> SpanKind:
    """The kind of collective that a name tells of."""
    plain = name.lower().replace("_", "")
    return next((kind for word, kind in WORDS.items() if word in plain), "other collective")


def is_operator(name: str) -> bool:
    """Whether an operator of torch starts a collective."""
    return name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(("wait_tensor", "barrier"))


def kernel_size(args: Event) -> tuple[int, int]:
    """(bytes of the whole tensor, ranks) of an NCCL kernel, from what torch writes beside it."""
    wide = max(_number(args.get("In msg nelems")), _number(args.get("Out msg nelems")))
    return wide * _item(args.get("dtype")), _number(args.get("Group size"))


def operator_size(kind: SpanKind, event: Event, world: int) -> tuple[int, int]:
    """(bytes of the whole tensor, ranks) of an operator, from the shapes of its inputs."""
    args = event.get("args", {})
    types, sizes = args.get("Input type") or [], input_elements(args)
    if len(sizes) < 2 or not types:
        return 0, world
    if event["name"].startswith("_c10d_functional::all_gather"):
        ranks = _number((args.get("Concrete Inputs") or [0, 0])[1])
        return sizes[0] * _item(types[0]) * ranks, ranks
    if kind in ("gather", "reduce") and min(sizes) > 0:  # one is the whole tensor, the other a rank's part
        return max(sizes) * _item(types[0]), round(max(sizes) / min(sizes))
    return sizes[0] * _item(types[0]), world


def input_elements(args: Event) -> list[int]:
    """Elements of the first two inputs, as far as the trace has shapes."""
    return [_elements(d) for d in (args.get("Input Dims") or [])[:2]]


def _elements(dims: Any) -> int:
    """Elements of a tensor, or of the first of a list of tensors."""
    if not isinstance(dims, list):
        return 0
    if dims and isinstance(dims[0], list):
        return _elements(dims[0])
    return math.prod(n for n in dims if isinstance(n, int))


def _item(dtype: Any) -> int:
    return SIZES.get(str(dtype).lower().removeprefix("c10::"), 0)


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
