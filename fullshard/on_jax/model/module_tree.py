"""The modules and parameters of an NNX model by name, in the order in which they were assigned."""

from collections.abc import Iterator
from typing import Any

from flax import nnx

from fullshard.base.errors import FullshardError
from fullshard.model.module_grouping import ModuleNode


def children(module: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    """The modules that are attributes of a module, or elements of a list."""
    return ((str(name), value) for name, value in vars(module).items() if isinstance(value, nnx.Module))


def own_parameters(module: nnx.Module) -> Iterator[tuple[str, nnx.Param]]:
    """The parameters of a module itself, without those of its children."""
    return ((str(name), value) for name, value in vars(module).items() if isinstance(value, nnx.Param))


def named_modules(module: nnx.Module, path: str = "") -> Iterator[tuple[str, nnx.Module]]:
    """Every module inside and this one, with its path. One that a model has in two places comes twice."""
    yield path, module
    for name, child in children(module):
        yield from named_modules(child, f"{path}.{name}" if path else name)


def named_parameters(model: nnx.Module) -> dict[str, nnx.Param]:
    """Every parameter once, by its first name."""
    return {names[0]: p for p, names in _all_names(model).values()}


def parameter_names(model: nnx.Module) -> dict[int, list[str]]:
    """All names of each parameter by its id. A tied parameter has several."""
    return {key: names for key, (_, names) in _all_names(model).items()}


def _all_names(model: nnx.Module) -> dict[int, tuple[nnx.Param, list[str]]]:
    found: dict[int, tuple[nnx.Param, list[str]]] = {}
    for path, module in named_modules(model):
        for name, p in own_parameters(module):
            found.setdefault(id(p), (p, []))[1].append(f"{path}.{name}" if path else name)
    return found


def module_at(model: nnx.Module, path: str) -> nnx.Module:
    """The module at a path; the model itself at an empty one. Raises if there is none: the plan is another model's."""
    found: Any = model
    for name in path.split(".") if path else ():
        found = vars(found).get(name)
        if not isinstance(found, nnx.Module):
            raise FullshardError(f"the model has no module {path}: the plan was made for another model; describe this one")
    return found


def module_nodes(module: nnx.Module, known: dict[int, ModuleNode]) -> ModuleNode:
    """The modules of a model as nodes, for grouping. `known`: those made already."""
    if id(module) not in known:
        own = dict(own_parameters(module))
        known[id(module)] = ModuleNode(
            cls=type(module),
            parameters={n: p.size for n, p in own.items()},
            identities={n: id(p) for n, p in own.items()},
            children=[(n, module_nodes(child, known)) for n, child in children(module)],
            is_container=isinstance(module, nnx.List | nnx.Dict),
            has_forward=callable(module),
            kind="embed" if isinstance(module, nnx.Embed) else "block",
        )
    return known[id(module)]


def scope_of(unit: str) -> str:
    """The scope of a unit in compiled programs and profiles."""
    return f"unit[{unit}]"
