"""A batch is any tree of tensors: dicts, tuples, lists, dataclasses and Hugging Face's `BatchEncoding`, in any nesting.

What is no tensor and no array (text, numbers, None) stays as it is.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullshard.base.errors import FullshardError, a_kind

BATCH = "a batch is a dict of tensors, {'input_ids': ids[:, :-1], 'labels': ids[:, 1:]}, or another tree of tensors"
Change = Callable[[str, Tensor], Tensor]  # of a leaf: its path and its tensor


def on_device(batch: Any, device: torch.device) -> Any:
    """Start copying the batch to the device; returns it as the same tree of tensors there."""
    if isinstance(batch, list) or not is_tree(batch):
        raise FullshardError(f"{BATCH}, not {a_kind(batch)}; a step takes a list of them")
    found = map_tensors(batch, lambda _, t: t.to(device, non_blocking=True))
    if next(leaves(found), None) is None:
        raise FullshardError(f"a batch of {a_kind(batch)} has no tensor; {BATCH}")
    return found


def is_tree(value: object) -> bool:
    """True for a tensor, and for what may contain tensors."""
    tree = isinstance(value, Tensor | np.ndarray | Mapping | tuple | list)
    return tree or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def map_tensors(tree: Any, change: Change, path: str = "") -> Any:
    """The same tree with every tensor changed. Arrays and nested lists of numbers become tensors first."""
    if isinstance(tree, Tensor):
        return change(path, tree)
    if isinstance(tree, np.ndarray | np.generic) or _is_numbers(tree):
        return change(path, _tensor(path, tree))
    if isinstance(tree, Mapping):
        return _like(tree, {k: map_tensors(v, change, _join(path, k)) for k, v in tree.items()})
    if isinstance(tree, list | tuple):
        parts = [map_tensors(v, change, _join(path, i)) for i, v in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        made = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(made, field.name, map_tensors(getattr(tree, field.name), change, _join(path, field.name)))
        return made
    return tree


def leaves(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of every tensor, in order."""
    found: list[tuple[str, Tensor]] = []

    def note(path: str, tensor: Tensor) -> Tensor:
        found.append((path, tensor))
        return tensor

    map_tensors(tree, note)
    return iter(found)


def row_count(tree: Any) -> int | None:
    """The size of dim 0, if all tensors with dims share it."""
    sizes = {t.shape[0] for _, t in leaves(tree) if t.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def rows(tree: Any, part: slice) -> Any:
    """Some of the rows: every tensor with dims, cut along dim 0."""
    return map_tensors(tree, lambda _, t: t[part] if t.ndim else t)


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor by its path."""
    return {path: tuple(t.shape) for path, t in leaves(tree)}


def _like(tree: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same type with these values."""
    if type(tree) is dict or not isinstance(tree, MutableMapping):
        return values
    made = copy.copy(tree)
    for key, value in values.items():
        made[key] = value
    return made


def _is_numbers(value: Any) -> bool:
    """True for a list of numbers, or a list of such lists."""
    return isinstance(value, list) and bool(value) and all(_is_numbers(v) or isinstance(v, int | float) for v in value)


def _tensor(path: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise FullshardError(f"{path or 'the array'} of a batch cannot be made a tensor ({why}); {BATCH}") from None


def _join(path: str, part: object) -> str:
    return f"{path}.{part}" if path else str(part)
