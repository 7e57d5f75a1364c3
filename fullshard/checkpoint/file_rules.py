"""How the tensors of files become those of a model where the two are arranged differently.

Files may hold each expert of a mixture as a tensor of its own, while the model has one tensor of all experts. A rule says
how one such group of tensors is stacked, concatenated, split or transposed. It works in both directions: `pieces` pairs the
boxes of the model's tensors with those of the files'.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fullshard.base.untrusted_files import is_name
from fullshard.checkpoint.safetensors import Box, is_count, is_shape

MOST_FILES = 1 << 22  # tensors in files that the rules of one checkpoint may name
Step = tuple[str, tuple[int, ...]]  # see `FileRule.steps`
Shape = tuple[int, ...]


def bare_name(name: str) -> str:
    """The name of a tensor in the model without adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


@dataclass(frozen=True)
class FilePiece:
    """A box of a model's tensor that is stored as a box of a file's tensor. Dim i of the file's tensor is dim `dims[i]` of the
    model's; in the model's other dims the box has size 1. `start`: where the box begins in the file's tensor."""

    tensor: str
    file: str
    box: tuple[tuple[int, int], ...]
    dims: tuple[int, ...]
    start: tuple[int, ...]

    def file_box(self, box: Box) -> Box:
        """The box of the file's tensor for `box`, a part of this piece in the model's tensor."""
        shift = [start - self.box[d][0] for d, start in zip(self.dims, self.start, strict=True)]
        return [(box[d][0] + s, box[d][1] + s) for d, s in zip(self.dims, shift, strict=True)]

    def order(self) -> list[int]:
        """The permutation of the file's dims that sorts them as the model's are."""
        return sorted(range(len(self.dims)), key=lambda i: self.dims[i])


@dataclass(frozen=True)
class FileRule:
    """How tensors of files become tensors of a model.

    `files`: name and shape of each. A `*` in a name stands for the numbers 0 to `count` - 1: that many tensors. `steps`, in
    this order: `stack` (dim) joins the numbered tensors of each name along a new dim, `concat` (dim) joins all tensors along
    a dim, `split` (dim, sizes) cuts one into several, `transpose` (dim, dim) swaps two dims. What is left are `tensors`.
    """

    tensors: tuple[str, ...]
    files: tuple[tuple[str, Shape], ...]
    steps: tuple[Step, ...] = ()
    count: int = 1

    def file_names(self) -> list[str]:
        return [name for pattern, _ in self.files for name in _numbered(pattern, self.count)]

    def file_shapes(self) -> dict[str, Shape]:
        return {name: shape for pattern, shape in self.files for name in _numbered(pattern, self.count)}

    def shapes(self) -> dict[str, Shape]:
        """The shapes of the model's tensors that the rule makes."""
        return {name: value.shape for name, value in zip(self.tensors, self._values(), strict=True)}

    def pieces(self) -> list[FilePiece]:
        """The boxes of all of the rule's tensors."""
        named = zip(self.tensors, self._values(), strict=True)
        return [replace(piece, tensor=name) for name, value in named for piece in value.pieces]

    def _values(self) -> list["_Value"]:
        """The model's tensors in order, each as the boxes of files' tensors that it is made of."""
        groups = [[_whole(n, shape) for n in _numbered(pattern, self.count)] for pattern, shape in self.files]
        for kind, numbers in self.steps:
            if kind == "stack":
                groups = [[_stack(group, numbers[0])] for group in groups]
            elif kind == "concat":
                groups = [[_concat([v for group in groups for v in group], numbers[0])]]
            elif kind == "split":
                groups = [[part] for part in _split(groups[0][0], numbers[0], numbers[1:])]
            else:
                groups = [[_transpose(v, *numbers) for v in group] for group in groups]
        return [v for group in groups for v in group]

    def to_json(self) -> dict[str, Any]:
        files = [[name, list(shape)] for name, shape in self.files]
        steps = [[kind, *numbers] for kind, numbers in self.steps]
        return {"tensors": list(self.tensors), "files": files, "count": self.count, "steps": steps}


# -- reading rules that a checkpoint has -----------------------------------------------------------------------


def rules_from_json(value: Any, tensors: Mapping[str, Sequence[int]]) -> list[FileRule]:
    """The rules of a manifest, which is untrusted. Raises a ValueError unless they make tensors of these shapes."""
    rules = [_rule(entry) for entry in value] if isinstance(value, list) else None
    _need(rules is not None)
    assert rules is not None
    _need(sum(len(rule.files) * rule.count for rule in rules) <= MOST_FILES)
    made = [n for rule in rules for n in rule.tensors]
    _need(len(set(made)) == len(made) and all(n in tensors for n in made))
    for rule in rules:
        stored = rule.count * sum(math.prod(shape) for _, shape in rule.files)
        _need(stored == sum(math.prod(tensors[n]) for n in rule.tensors))
        try:
            _need(all(tuple(tensors[n]) == shape for n, shape in rule.shapes().items()))
        except (IndexError, TypeError, ValueError):
            raise ValueError("malformed") from None
    return rules


def _rule(entry: Any) -> FileRule:
    _need(isinstance(entry, dict) and entry.keys() == {"tensors", "files", "count", "steps"})
    tensors, files, count, steps = entry["tensors"], entry["files"], entry["count"], entry["steps"]
    _need(_is_list(tensors) and all(map(is_name, tensors)) and is_count(count) and 1 <= count <= MOST_FILES)
    _need(_is_list(files) and all(_is_list(f, 2) and is_name(f[0]) and is_shape(f[1]) for f in files))
    _need(count == 1 or all(f[0].count("*") == 1 for f in files))
    _need(isinstance(steps, list) and len(steps) <= 8 and all(map(_is_step, steps)))
    made = tuple((step[0], tuple(step[1:])) for step in steps)
    return FileRule(tuple(tensors), tuple((name, tuple(shape)) for name, shape in files), made, count)


def _is_list(value: Any, length: int | None = None) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= MOST_FILES and length in (None, len(value))


def _is_step(step: Any) -> bool:
    if not _is_list(step) or step[0] not in ("stack", "concat", "split", "transpose") or not all(map(is_count, step[1:])):
        return False
    numbers = len(step) - 1
    return numbers >= 2 if step[0] == "split" else numbers == (2 if step[0] == "transpose" else 1)


def _need(holds: bool) -> None:
    if not holds:
        raise ValueError("malformed")


def pieces_by_file(rules: Iterable[FileRule]) -> dict[str, list[FilePiece]]:
    by_file: dict[str, list[FilePiece]] = {}
    for rule in rules:
        for piece in rule.pieces():
            by_file.setdefault(piece.file, []).append(piece)
    return by_file


# -- steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Value:
    """A tensor that steps have made so far, and the pieces that it consists of."""

    shape: Shape
    pieces: tuple[FilePiece, ...]


def _whole(file: str, shape: Shape) -> _Value:
    box = tuple((0, n) for n in shape)
    return _Value(shape, (FilePiece("", file, box, tuple(range(len(shape))), (0,) * len(shape)),))


def _numbered(pattern: str, count: int) -> list[str]:
    return [pattern.replace("*", str(i)) for i in range(count)] if count > 1 or "*" in pattern else [pattern]


def _stack(values: Sequence[_Value], dim: int) -> _Value:
    _need(len({v.shape for v in values}) == 1 and dim <= len(values[0].shape))
    shape = values[0].shape
    pieces = []
    for i, value in enumerate(values):
        for p in value.pieces:
            dims = tuple(d + (d >= dim) for d in p.dims)
            pieces.append(replace(p, box=(*p.box[:dim], (i, i + 1), *p.box[dim:]), dims=dims))
    return _Value((*shape[:dim], len(values), *shape[dim:]), tuple(pieces))


def _concat(values: Sequence[_Value], dim: int) -> _Value:
    other = {(*v.shape[:dim], *v.shape[dim + 1 :]) for v in values}
    _need(len(other) == 1 and all(dim < len(v.shape) for v in values))
    at, pieces = 0, []
    for value in values:
        for p in value.pieces:
            start, stop = p.box[dim]
            pieces.append(replace(p, box=(*p.box[:dim], (start + at, stop + at), *p.box[dim + 1 :])))
        at += value.shape[dim]
    return _Value((*values[0].shape[:dim], at, *values[0].shape[dim + 1 :]), tuple(pieces))


def _split(value: _Value, dim: int, sizes: Sequence[int]) -> list[_Value]:
    _need(dim < len(value.shape) and sum(sizes) == value.shape[dim])
    parts, at = [], 0
    for size in sizes:
        cut = [_cut(p, dim, at, at + size) for p in value.pieces]
        shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
        parts.append(_Value(shape, tuple(p for p in cut if p is not None)))
        at += size
    return parts


def _cut(piece: FilePiece, dim: int, start: int, stop: int) -> FilePiece | None:
    """The part of a piece between `start` and `stop` of a dim, in coordinates that begin at `start`."""
    a, b = max(piece.box[dim][0], start), min(piece.box[dim][1], stop)
    if a >= b:
        return None
    moved = tuple(s + (a - piece.box[dim][0]) * (d == dim) for d, s in zip(piece.dims, piece.start, strict=True))
    return replace(piece, box=(*piece.box[:dim], (a - start, b - start), *piece.box[dim + 1 :]), start=moved)


def _transpose(value: _Value, a: int, b: int) -> _Value:
    swap = {a: b, b: a}
    _need(max(a, b) < len(value.shape))

    def swapped(items: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(items[swap.get(d, d)] for d in range(len(items)))

    pieces = (replace(p, box=swapped(p.box), dims=tuple(swap.get(d, d) for d in p.dims)) for p in value.pieces)
    return _Value(swapped(value.shape), tuple(pieces))
