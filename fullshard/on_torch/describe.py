"""Describe a model: group its modules into units, and list the tensors of each unit.

Works on any `nn.Module`, on the meta device or not. Reads only names, shapes and registration order.
"""

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fullshard.errors import FullshardError, checked_call, nearest
from fullshard.model.description import Description, Tensor, UnitDescription, UnitKind
from fullshard.on_torch.dtypes import plan_dtype_name
from fullshard.on_torch.experts import expert_count, expert_modules
from fullshard.on_torch.loss import LossFunction, summed_loss
from fullshard.on_torch.tied_parameters import parameter_names
from fullshard.on_torch.tracing.trace_costs import costs, example_costs
from fullshard.plan import DType, Split, SplitRules
from fullshard.plan_parts import checked_splits
from fullshard.text import spans

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@checked_call("describe(model), with a torch.nn.Module", model=nn.Module)
def describe(
    model: nn.Module,
    *,
    classes: Sequence[str] = (),
    names: Sequence[str] = (),
    min_params: int = 0,
    experts: bool = False,
    small: int = 0,
    title: str = "",
    micro_batch: int = 0,
    sequence: int = 0,
    example: Any = None,
    loss: LossFunction | None = None,
    compute: DType = "bf16",
    tensor: Sequence[int] = (),
    expert: Sequence[int] = (),
    split: Mapping[str, Split] | SplitRules = (),
) -> Description:
    """Group the modules of `model` into units. With `micro_batch` and `sequence`, also trace the costs of computing them
    in dtype `compute`, and the costs on a rank of a `tensor` or `expert` axis of each of these sizes. `split`: how a tensor
    axis splits modules, as in a plan.

    A model that is no causal language model is traced with `example`, a batch of any tensors, and `loss`, the function that
    `train_step` will get. Only shapes matter, and the values of integers.

    By default each repeated block is a unit. Modules before the blocks form the unit `embed`, modules after them the unit
    `head`. With `experts`, the experts of each block are a unit of their own: they gather apart from the rest, and can be
    spread over an expert axis. With `small`, the modules of a block whose tensors all have fewer elements, such as its norms,
    form a unit that strategies keep whole on every rank. Units that share a tied parameter are merged. To choose the blocks
    yourself, give one of: `classes`, class names; `names`, module paths with wildcards; `min_params`, the size from which a
    module is its own unit.
    """
    if next(model.parameters(), None) is None:
        raise FullshardError(f"{title or type(model).__name__} has no parameters; there is nothing to shard")
    blocks = _find_blocks(model, classes, names, min_params)
    blocks += [path for path in _find_experts(model, experts, title) if path not in blocks]
    groups = _merge_tied(model, _with_leftovers(model, blocks))
    units, buffers = _list_tensors(model, _with_small(model, groups, small) if small else groups)
    found = Description(title or type(model).__name__, tuple(units), buffers)
    if example is not None:
        _refuse_two_shapes(micro_batch, sequence)
        axes: dict[str, Any] = {"tensor": tensor, "expert": expert, "rules": checked_splits(split)}
        traced = example_costs(model, found, example, _example_loss(example, loss), compute=compute, **axes)
        return replace(found, costs=traced)
    if loss is not None:
        raise FullshardError("loss has no effect without an example; write describe(model, example=batch, loss=function)")
    if not micro_batch or not sequence:
        return found
    shape = {"micro_batch": micro_batch, "sequence": sequence}
    return replace(
        found, costs=costs(model, found, **shape, compute=compute, tensor=tensor, expert=expert, rules=checked_splits(split))
    )


def _refuse_two_shapes(micro_batch: int, sequence: int) -> None:
    if micro_batch or sequence:
        raise FullshardError("an example has a shape of its own; leave micro_batch and sequence out")


def _example_loss(example: Any, loss: LossFunction | None) -> LossFunction:
    if loss is not None:
        return loss
    if isinstance(example, Mapping) and "input_ids" in example and "labels" in example:
        return summed_loss
    raise FullshardError("an example needs its loss; write describe(model, example=batch, loss=function), as train_step takes it")


class _Group:
    """A unit under construction."""

    def __init__(self, name: str, kind: UnitKind, modules: list[str]):
        self.name, self.kind, self.modules = name, kind, modules


# -- finding the blocks ----------------------------------------------------------------------------


def _find_blocks(model: nn.Module, classes: Sequence[str], names: Sequence[str], min_params: int) -> list[str]:
    """The paths of the blocks, by the one rule that is given, or else the repeated blocks."""
    if min_params < 0:
        raise FullshardError(f"min_params must be at least 1, not {min_params}")
    rules = {"classes": bool(classes), "names": bool(names), "min_params": bool(min_params)}
    if sum(rules.values()) > 1:
        raise FullshardError(f"grouping takes one rule, not {' and '.join(k for k, on in rules.items() if on)}")
    if classes:
        return _by_class(model, classes)
    if names:
        return _by_name(model, names)
    return _by_size(model, min_params) if min_params else repeated_blocks(model)


def _find_experts(model: nn.Module, apart: bool, title: str) -> list[str]:
    found = list(expert_modules(model)) if apart else []
    if apart and not found:
        raise FullshardError(
            f"{title or type(model).__name__} has no experts that could be units of their own; leave experts out"
        )
    return found


def _with_small(model: nn.Module, groups: list[_Group], below: int) -> list[_Group]:
    """The groups, each block followed by a group of the modules inside it that own only small tensors."""
    found, units = [], {m for g in groups for m in g.modules}
    for group in groups:
        found.append(group)
        block = group.modules[0] if group.kind == "block" and len(group.modules) == 1 else None
        inside = model.get_submodule(block).named_modules() if block else ()
        paths = [f"{block}.{p}" for p, m in inside if p and f"{block}.{p}" not in units and _is_small(m, below)]
        if paths:
            found.append(_Group(f"{block}.small", "small", paths))
    if not any(g.kind == "small" for g in found):
        raise FullshardError(
            f"small = {below} has no effect: every module inside a block has a tensor of {below} elements or more"
        )
    return found


def _is_small(module: nn.Module, below: int) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(own) and len(own) == len(list(module.parameters())) and all(p.numel() < below for p in own)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Paths of the outermost modules that repeat: the layers of a transformer, the stages of a network.

    Layers with submodules are preferred to a list of plain linear layers. Without any container, the model's own
    children are the blocks.
    """
    for composite in (True, False):
        found = [path for container in _outermost_repeating(model, "", composite) for path in container]
        if found:
            return found
    return _children_with_parameters(model)


def _outermost_repeating(module: nn.Module, path: str, composite: bool) -> Iterator[list[str]]:
    children = [(f"{path}.{n}" if path else n, c) for n, c in module.named_children() if _has_parameters(c)]
    kinds = Counter(type(c) for _, c in children if not composite or any(True for _ in c.children()))
    repeating = [t for t, count in kinds.items() if count > 1 or (len(children) == 1 and isinstance(module, nn.ModuleList))]
    if isinstance(module, CONTAINERS) and repeating:
        yield [p for p, _ in children]
        return
    for child_path, child in children:
        yield from _outermost_repeating(child, child_path, composite)


def _children_with_parameters(model: nn.Module) -> list[str]:
    paths = [n for n, c in model.named_children() if _has_parameters(c)]
    if len(paths) == 1 and any(True for _ in model.get_submodule(paths[0]).children()):
        return [f"{paths[0]}.{p}" for p in _children_with_parameters(model.get_submodule(paths[0]))]
    return paths if len(paths) > 1 else []


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_list(module: nn.Module) -> bool:
    """True for containers without a forward: FSDP cannot hook them, so they cannot be units."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _by_class(model: nn.Module, classes: Sequence[str]) -> list[str]:
    present = Counter(type(m).__name__ for p, m in model.named_modules() if p and _has_parameters(m) and not _is_list(m))
    for name in classes:
        if name not in present:
            listing = ", ".join(f"{k} ×{n}" for k, n in present.items())
            raise FullshardError(f"no module of class {name!r}{nearest(name, list(present))} (the model has {listing})")
    return _outermost([p for p, m in model.named_modules() if p and type(m).__name__ in classes])


def _by_name(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    paths = [p for p, m in model.named_modules() if p and _has_parameters(m) and not _is_list(m)]
    hits: set[str] = set()
    for pattern in patterns:
        matched = [p for p in paths if fnmatch.fnmatchcase(p, pattern) and p.count(".") == pattern.count(".")]
        if not matched:
            listing = ", ".join(spans([p for p in paths if p.count(".") <= 2]))
            raise FullshardError(f"no module is called {pattern!r}{nearest(pattern, paths)} (the model has {listing})")
        hits.update(matched)
    return [p for p in paths if p in hits]


def _by_size(model: nn.Module, min_params: int) -> list[str]:
    """Bottom up, as FSDP1's size policy: a module is a block if its parameters outside inner blocks reach the size."""
    units: list[str] = []
    seen: set[int] = set()

    def visit(module: nn.Module, path: str) -> int:
        rest = sum(visit(child, f"{path}.{n}" if path else n) for n, child in module.named_children())
        for p in module.parameters(recurse=False):
            if id(p) not in seen:
                seen.add(id(p))
                rest += p.numel()
        if path and rest >= min_params and not _is_list(module):
            units.append(path)
            return 0
        return rest

    visit(model, "")
    if not units:
        sizes = [(sum(p.numel() for p in m.parameters()), n) for n, m in model.named_modules() if n and not _is_list(m)]
        largest = f"the largest, {max(sizes)[1]}, has {max(sizes)[0]}" if sizes else "the model has no modules inside"
        raise FullshardError(f"no module has {min_params} parameters; {largest}")
    return units


def _outermost(paths: list[str]) -> list[str]:
    return [p for p in paths if not any(p != q and p.startswith(f"{q}.") for q in paths)]


# -- modules outside the blocks ----------------------------------------------------------------------


def _with_leftovers(model: nn.Module, blocks: list[str]) -> list[_Group]:
    """The blocks and the groups of modules outside them: `embed` before the first block, `head` after the last, `middle`
    between (an encoder's last norm), `root` for parameters of a module around the blocks."""
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    ordered = sorted(blocks, key=order.__getitem__)
    embed, middle, head = _Group("embed", "embed", []), _Group("middle", "middle", []), _Group("head", "head", [])
    root = _Group("root", "root", [])
    for path in _leftover_modules(model, ordered):
        if path == "" or any(b.startswith(f"{path}.") for b in blocks):
            root.modules = [""]  # a module around blocks cannot be its own unit
        elif not ordered or order[path] < order[ordered[0]]:
            embed.modules.append(path)
        else:
            (head if order[path] > order[ordered[-1]] else middle).modules.append(path)
    groups = [g for g in (embed, *[_block(model, path) for path in ordered], middle, head) if g.modules]
    groups.sort(key=lambda g: order[g.modules[0]])
    if root.modules:
        groups.append(root)
    for group in (embed, middle, head, root):
        while group.name in blocks:  # a block may have this name already
            group.name += "_rest"
    return groups


def _block(model: nn.Module, path: str) -> _Group:
    module = model.get_submodule(path)
    kind: UnitKind = "experts" if expert_count(module) else "block"
    return _Group(path, "embed" if isinstance(module, nn.Embedding) else kind, [path])


def _leftover_modules(model: nn.Module, blocks: list[str]) -> list[str]:
    """The outermost modules outside all blocks that own parameters directly; `""` for the model itself."""
    owners = [
        path
        for path, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None and not _inside(path, blocks)
    ]
    free = [p for p in owners if p and not any(b.startswith(f"{p}.") for b in blocks)]
    around = [p for p in owners if p not in free]
    return [*around, *_outermost(free)]


def _inside(path: str, parents: Sequence[str]) -> bool:
    return any(path == p or path.startswith(f"{p}.") for p in parents if p)


def _merge_tied(model: nn.Module, groups: list[_Group]) -> list[_Group]:
    """Merge groups that share a tied parameter: FSDP can gather a parameter in one unit only."""
    for names in [found for found in parameter_names(model).values() if len(found) > 1]:
        sharing = [g for g in groups if any(_owner(n, groups) is g for n in names)]
        if sharing and sharing[-1].kind == "root":
            sharing.reverse()  # the root contains every module already
        for other in sharing[1:]:
            if sharing[0].kind != "root":
                sharing[0].modules += other.modules
            groups.remove(other)
    return groups


def _owner(parameter: str, groups: list[_Group]) -> _Group | None:
    """The group whose deepest module contains the parameter."""
    best: tuple[int, _Group | None] = (-1, None)
    for group in groups:
        for module in group.modules:
            if (module == "" or parameter.startswith(f"{module}.")) and len(module) > best[0]:
                best = (len(module), group)
    return best[1]


def _list_tensors(model: nn.Module, groups: list[_Group]) -> tuple[list[UnitDescription], tuple[Tensor, ...]]:
    """The units with their tensors, and the buffers that are in no unit."""
    names = parameter_names(model)
    parameters: dict[str, list[Tensor]] = {g.name: [] for g in groups}
    for name, p in model.named_parameters():
        group = _owner(name, groups)
        assert group is not None, name
        others = tuple(n for n in names[id(p)] if n != name)
        parameters[group.name].append(Tensor(name, tuple(p.shape), plan_dtype_name(name, p.dtype), p.requires_grad, others))
    buffers: dict[str, list[Tensor]] = {"": [], **{g.name: [] for g in groups}}
    for name, b in model.named_buffers():
        group = _owner(name, groups)
        buffers[group.name if group else ""].append(Tensor(name, tuple(b.shape), plan_dtype_name(name, b.dtype), False))
    units = [UnitDescription(g.name, g.kind, tuple(g.modules), tuple(parameters[g.name]), tuple(buffers[g.name])) for g in groups]
    return units, tuple(buffers[""])
