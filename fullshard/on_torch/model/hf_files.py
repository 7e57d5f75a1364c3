"""How transformers arranges a model in files: its own conversion rules, read as data.

The only module that touches transformers' conversion mapping. Since transformers 5 a model in memory may have other names
and shapes than its files: experts are one tensor in memory and a tensor each in files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.file_rules import FileRule, Shape, Step, bare_name
from fullshard.on_torch.model.lora import without_adapters
from fullshard.on_torch.model.scalars import as_vector
from fullshard.on_torch.private.torch_internals import persistent_buffers


class LayoutError(FullshardError):
    """Files whose arrangement fullshard cannot read."""


def file_rules(model: nn.Module, wanted: Mapping[str, Tensor], files: Mapping[str, Shape]) -> list[FileRule]:
    """The rules that make tensors of `wanted` from `files`, names and shapes. Files that no rule uses are not the model's.
    `wanted`: the model's tensors under their bare names."""
    names = _Names(model, wanted)
    groups: dict[str, dict[str, list[str]]] = {}  # by tensor, then by pattern
    for file in sorted(files, key=_natural):
        tensor, pattern = names.of_file(file)
        if tensor is not None:
            groups.setdefault(tensor, {}).setdefault(pattern, []).append(file)
    found = []
    for tensor, by_pattern in groups.items():
        converted = {p: group for p, group in by_pattern.items() if p}
        found += [_as_is(tensor, file, tuple(files[file]), wanted[tensor]) for file in by_pattern.get("", [])]
        if converted and "" not in by_pattern:
            found.append(_converted(names, tensor, converted, files))
    return found


def _as_is(tensor: str, file: str, shape: Shape, wanted: Tensor) -> FileRule:
    """A tensor that files have as the model has it, but for a scalar, which the state has as a vector."""
    vector = shape == () and tuple(wanted.shape) == (1,)
    return FileRule((tensor,), ((file, shape),), (("stack", (0,)),) if vector else ())


def saved_rules(model: nn.Module) -> list[FileRule]:
    """The rules for the files that transformers' `save_pretrained` writes of this model, where they differ from the model.
    Empty for other models, and where the files cannot be described: the model's own names are loaded as well."""
    inner = _hugging_face(model)
    if inner is None or not hasattr(_loading(), "revert_weight_conversion"):
        return []
    buffers = persistent_buffers(model)
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in buffers)]
    held = {bare_name(n): torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in named if ".lora_" not in n}
    own = {bare_name(n): as_vector(t) for n, t in named}
    try:
        files = _loading().revert_weight_conversion(inner, dict(held))
        found = file_rules(model, {n: own[n] for n in held}, {n: tuple(t.shape) for n, t in files.items()})
        made = [pair for rule in found for pair in rule.shapes().items()]
    except Exception:  # transformers has rules that run on its own loading only
        return []
    if sorted(made) != sorted((n, tuple(own[n].shape)) for n in held):
        return []
    return [rule for rule in found if rule.steps or rule.tensors[0] != rule.files[0][0]]


# -- names ---------------------------------------------------------------------------------------------------


class _Names:
    """Finds the model's name of a tensor in a file, and the converter that it passes through, if any."""

    def __init__(self, model: nn.Module, wanted: Mapping[str, Tensor]):
        self.wanted, self.inner = wanted, _hugging_face(model)
        prefix = getattr(self.inner if self.inner is not None else model, "base_model_prefix", "")
        self.prefix = prefix if isinstance(prefix, str) else ""
        found = _mapping(self.inner) if self.inner is not None else []
        self.converters = [t for t in found if hasattr(t, "operations")]
        self.renamings = [t for t in found if not hasattr(t, "operations")]
        self.by_pattern = {p: c for c in self.converters for p in c.source_patterns}

    def of_file(self, file: str) -> tuple[str | None, str]:
        """The model's name, and the pattern of the converter or ''. None if the model has no such tensor."""
        if self.renamings or self.converters:
            prefix = self.prefix or None
            name, pattern = _loading().rename_source_key(file, self.renamings, self.converters, prefix, self.wanted)
            if name in self.wanted:
                return name, pattern or ""
        spelled = (file, file.removeprefix(f"{self.prefix}."), f"{self.prefix}.{file}")
        return next((name for name in spelled if name in self.wanted), None), ""


def _hugging_face(model: nn.Module) -> Any:
    """The transformers model itself, without adapters; None if it is of another library."""
    inner = without_adapters(model)
    return inner if hasattr(inner, "base_model_prefix") and hasattr(inner, "config") else None


def _mapping(inner: Any) -> list[Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    return list(get_model_conversion_mapping(inner))


def _loading() -> Any:
    from transformers import core_model_loading

    return core_model_loading


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts experts.2 before experts.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


# -- rules ---------------------------------------------------------------------------------------------------


def _converted(names: _Names, tensor: str, groups: Mapping[str, list[str]], files: Mapping[str, Shape]) -> FileRule:
    """The rule of one converter of transformers, for the files that it takes."""
    converter = names.by_pattern[next(iter(groups))]
    patterns = [p for p in converter.source_patterns if p in groups]
    if len(patterns) < len(converter.source_patterns):
        lacking = next(p for p in converter.source_patterns if p not in groups)
        raise FullshardError(
            f"there is no tensor {lacking} for {tensor}, only {groups[patterns[0]][0]}: the files are incomplete"
        )
    numbered = [_template(groups[p], files) for p in patterns]
    if len({len(groups[p]) for p in patterns}) > 1:
        shown = " and ".join(f"{len(groups[p])} tensors {name}" for p, (name, _) in zip(patterns, numbered, strict=True))
        raise FullshardError(f"there are {shown} for {tensor}: the files are incomplete")
    tensors = _targets(converter, tensor)
    shapes = [tuple(names.wanted[t].shape) for t in tensors if t in names.wanted]
    if len(shapes) < len(tensors):
        raise LayoutError(_unreadable(tensor, converter.operations[0]))
    steps = _steps(converter.operations, tensor, numbered[0][1], shapes)
    return FileRule(tuple(tensors), tuple(numbered), steps, len(groups[patterns[0]]))


def _template(group: list[str], files: Mapping[str, Shape]) -> tuple[str, Shape]:
    """One name with a `*` for tensors that are numbered from 0 on, and their common shape."""
    first = group[0].split(".")
    if len(group) == 1:
        return group[0], tuple(files[group[0]])
    at = next(i for i, (a, b) in enumerate(zip(first, group[1].split("."), strict=True)) if a != b)
    name = ".".join([*first[:at], "*", *first[at + 1 :]])
    for i, file in enumerate(group):
        if file != name.replace("*", str(i)):
            raise FullshardError(f"there is no tensor {name.replace('*', str(i))} before {file}: the files are incomplete")
        if files[file] != files[group[0]]:
            raise FullshardError(f"{file} is {list(files[file])}, but {group[0]} is {list(files[group[0]])}: make them equal")
    return name, tuple(files[group[0]])


def _targets(converter: Any, first: str) -> list[str]:
    """The model's tensors that a converter makes; `first` is the name of the first."""
    patterns = converter.target_patterns
    head, found, tail = first.partition(patterns[0])
    return [head + p + tail for p in patterns] if found and len(patterns) > 1 else [first]


def _steps(operations: Sequence[Any], tensor: str, shape: Shape, wanted: Sequence[Shape]) -> tuple[Step, ...]:
    steps: list[Step] = []
    for op in operations:
        match type(op).__name__:
            case "MergeModulelist":
                steps.append(("stack", (op.dim,)))
            case "Concatenate":
                steps.append(("concat", (op.dim,)))
            case "Chunk" | "Split" if len(wanted) > 1:
                steps.append(("split", (op.dim, *(s[op.dim] for s in wanted))))
            case "Transpose":
                if not (getattr(op, "check_dims", False) and shape == wanted[0]):
                    steps.append(("transpose", (op.dim0, op.dim1)))
            case _:
                raise LayoutError(_unreadable(tensor, op))
    return tuple(steps)


def _unreadable(tensor: str, operation: object) -> str:
    return (
        f"{tensor} is stored in a layout ({type(operation).__name__}) that cannot be read in parts; load the model with "
        "from_pretrained and give it to shard() without weights="
    )
