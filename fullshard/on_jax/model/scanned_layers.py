"""Equal blocks as one block whose arrays have a dim for the layers, computed by a loop. A step then compiles one block, not all.

In names, `*` stands for the number of a layer: `model.layers.*.mlp.up_proj.weight`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx

from fullshard.base.errors import FullshardError
from fullshard.on_jax.model.module_tree import children, module_at, named_parameters, parameter_names, scope_of
from fullshard.plan.plan import Home, Plan, Unit

LAYERS = "*"


def scan_layers(blocks: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Call every block with what the one before it returned: `for block in blocks: x = block(x, …)`. If the model was sharded
    with `scan=True`, all calls are one compiled loop."""
    if isinstance(blocks, StackedBlocks):
        return blocks.scan(x, args, kwargs)
    for block in blocks:
        x = block(x, *args, **kwargs)
    return x


class StackedBlocks(nnx.Module):
    """The blocks of a list as one block, called `*`. The first dim of its arrays counts the layers."""

    def __init__(self, block: nnx.Module, path: str):
        setattr(self, LAYERS, block)
        self.path = path

    def scan(self, x: Any, args: Any, kwargs: Any) -> Any:
        graph, params, *others = nnx.split(getattr(self, LAYERS), nnx.Param, ...)

        def body(x: Any, layer: Any) -> tuple[Any, Any]:
            block = nnx.merge(graph, *layer)
            out = block(x, *args, **kwargs)
            self._refuse_other(x, out)
            return out, nnx.state(block, nnx.Not(nnx.Param))

        with jax.named_scope(scope_of(f"{self.path}.{LAYERS}")):  # XLA gathers before it slices, outside the block's own scope
            out, changed = jax.lax.scan(body, x, (params, others[0]))
        nnx.update(getattr(self, LAYERS), changed)
        return out

    def _refuse_other(self, x: Any, out: Any) -> None:
        of = lambda tree: jax.tree.map(lambda leaf: f"{leaf.dtype.name} {list(leaf.shape)}", tree)
        if of(x) != of(out):
            raise FullshardError(
                f"model.scan: a block of {self.path} gets {of(x)} and returns {of(out)}, which the next one cannot get; return "
                "the shape and dtype that it was given, or leave model.scan out"
            )

    def _refuse_loop(self, *_: Any) -> NoReturn:
        name = self.path.rpartition(".")[2]
        raise FullshardError(
            f"model.scan: the model's call reads the blocks of {self.path} one by one; write x = on_jax.scan_layers(self.{name}, "
            "x, …) in place of its loop, or leave model.scan out"
        )

    __iter__ = __len__ = __getitem__ = _refuse_loop


@dataclass(frozen=True)
class Stack:
    """The list of blocks at `path`, as one block."""

    path: str
    count: int

    @property
    def name(self) -> str:
        return f"{self.path}.{LAYERS}"

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(f"{self.path}.{i}" for i in range(self.count))

    def layer_names(self, name: str) -> list[str] | None:
        """The names of what the stack holds under `name`, which may have a prefix; None if that is not in this stack."""
        before, found, inner = f".{name}".rpartition(f".{self.name}.")
        return [f"{before}.{module}.{inner}"[1:] for module in self.modules] if found else None

    def unit(self, plan: Plan) -> Unit:
        """The unit of all blocks. Raises where the plan treats them differently."""
        found: list[Unit] = []
        for module in self.modules:
            unit = plan.unit_of(f"{module}.x")
            inner = [m for u in plan.units for m in u.modules if m.startswith(f"{module}.")]
            if unit is None or unit.modules != (module,) or inner:
                raise FullshardError(f"model.scan: {module} is not a unit of its own in the plan; leave model.scan out")
            found.append(replace(unit, name=self.name, modules=self.modules))
            if found[-1] != found[0]:
                raise FullshardError(
                    f"model.scan: the plan treats unit {unit.name} otherwise than {self.modules[0]}, but scanned blocks are "
                    "carried out alike; give them the same layout, reshard, remat and home, or leave model.scan out"
                )
        if found[0].home != Home():
            raise FullshardError(
                f"unit {self.modules[0]}: scanned blocks rest on the device; write home = 'device', or leave model.scan out"
            )
        return found[0]


def layer_names(stacks: Sequence[Stack], name: str) -> list[str]:
    """The names that a checkpoint has for `name`: one for each layer of a stack."""
    longest = sorted(stacks, key=lambda stack: -len(stack.path))  # the path of one may end another's
    return next((found for stack in longest if (found := stack.layer_names(name))), [name])


def is_stacked(name: str) -> bool:
    """Whether the first dim of what has this name counts layers."""
    return LAYERS in name.split(".")


def executed(plan: Plan, stacks: Sequence[Stack]) -> Plan:
    """The plan with the units of each stack as one."""
    if not stacks:
        return plan
    of = {module: stack for stack in stacks for module in stack.modules}
    units = [of[u.modules[0]].unit(plan) if u.modules[0] in of else u for u in plan.units]
    return replace(plan, units=tuple(dict.fromkeys(units)))


# -- from lists of blocks to stacks ----------------------------------------------------------------------------


def find_stacks(model: nnx.Module) -> tuple[Stack, ...]:
    """The lists of blocks of a model. Raises where blocks of one list differ. `model` may be abstract."""
    found = tuple(Stack(path, len(list(children(blocks)))) for path, blocks in _lists(model, ""))
    if not found:
        raise FullshardError("model.scan: the model has no nnx.List of several blocks; leave model.scan out")
    ties = {name for names in parameter_names(model).values() if len(names) > 1 for name in names}
    for stack in found:
        first = stack.modules[0]
        form = _form(module_at(model, first))
        for path in stack.modules:
            if _form(module_at(model, path)) != form:
                raise FullshardError(
                    f"model.scan: {path} is not made as {first} is ({_difference(model, first, path)}); only equal blocks can be "
                    "scanned: leave model.scan out"
                )
            if shared := [name for name in ties if name.startswith(f"{path}.")]:
                raise FullshardError(f"model.scan: {shared[0]} is a parameter of another module, too; leave model.scan out")
    return found


def stack_blocks(model: nnx.Module, stacks: Sequence[Stack]) -> None:
    """Replace lists of blocks in an abstract model."""
    for stack in stacks:
        parent, _, name = stack.path.rpartition(".")
        graph, shapes = nnx.split(module_at(model, stack.modules[0]))
        grown = jax.tree.map(lambda s, n=stack.count: jax.ShapeDtypeStruct((n, *s.shape), s.dtype), shapes)
        setattr(module_at(model, parent), name, StackedBlocks(nnx.merge(graph, grown), stack.path))


def stacked_variables(rest: Any, stacks: Sequence[Stack], sharding: jax.sharding.NamedSharding) -> Any:
    """Variables of a model, those of scanned blocks as one."""
    if not stacks:
        return rest
    flat = {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(rest)}
    stack = jax.jit(lambda *layers: jnp.stack(layers), out_shardings=sharding)
    found = []
    for name, (path, variable) in flat.items():
        own = next((s for s in stacks if name.startswith(f"{s.path}.")), None)
        if own is None:
            found.append((path, variable))
        elif name.startswith(f"{own.modules[0]}."):
            depth = own.path.count(".") + 1
            layers = [flat[module + name.removeprefix(own.modules[0])][1].get_value() for module in own.modules]
            found.append(((*path[:depth], LAYERS, *path[depth + 1 :]), variable.replace(stack(*layers))))
    return nnx.from_flat_state(found)


def _lists(module: nnx.Module, path: str) -> Iterator[tuple[str, nnx.Module]]:
    """The outermost lists of at least two modules that can be called, with their paths."""
    for name, child in children(module):
        at = f"{path}.{name}" if path else name
        blocks = [block for _, block in children(child)] if isinstance(child, nnx.List) else []
        if len(blocks) > 1 and all(callable(block) for block in blocks):
            yield at, child
        else:
            yield from _lists(child, at)


def _form(block: nnx.Module) -> Any:
    """What blocks must have in common: their modules and settings, the shapes and dtypes of their arrays."""
    graph, state = nnx.split(block)
    return graph, [(path, v.get_value().shape, v.get_value().dtype) for path, v in nnx.to_flat_state(state)]


def _difference(model: nnx.Module, first: str, other: str) -> str:
    shapes = [{n: list(p.shape) for n, p in named_parameters(module_at(model, path)).items()} for path in (first, other)]
    for name in shapes[0] | shapes[1]:
        one, two = (found.get(name) for found in shapes)
        if one != two:
            return f"{name} is {two or 'missing'} in place of {one or 'none'}"
    return "their settings differ"
