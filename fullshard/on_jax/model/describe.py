"""Describe an NNX model: group its modules into units, and list the tensors of each unit."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from fullshard.base.errors import FullshardError, a_kind, first_line
from fullshard.model.description import Description, Tensor, UnitDescription
from fullshard.model.module_grouping import group_modules, owner_of
from fullshard.on_jax.model.module_tree import module_nodes, named_modules, named_parameters, parameter_names
from fullshard.on_jax.tensors.dtypes import plan_dtype_name

Factory = Callable[[nnx.Rngs], nnx.Module]  # makes a model: `lambda rngs: Llama(size, rngs=rngs)`


def describe(
    make: Factory, *, classes: Sequence[str] = (), names: Sequence[str] = (), min_params: int = 0, small: int = 0, title: str = ""
) -> Description:
    """Group the modules of the model that `make` returns into units, without memory for its weights.

    The rules are those of `on_torch.describe`: each repeated block is a unit, modules before the blocks form the unit `embed`,
    modules after them the unit `head`; units that share a tied parameter are merged.
    """
    model = abstract(make)
    found, names_of = named_parameters(model), parameter_names(model)
    title = title or type(model).__name__
    if not found:
        raise FullshardError(f"{title} has no parameters; there is nothing to shard")
    rule = {"classes": classes, "names": names, "min_params": min_params, "small": small}
    groups = group_modules(module_nodes(model, {}), names_of, **rule)  # type: ignore[arg-type]
    tensors: dict[str, list[Tensor]] = {g.name: [] for g in groups}
    for name, p in found.items():
        group = owner_of(name, groups)
        assert group is not None, name
        ties = tuple(n for n in names_of[id(p)] if n != name)
        tensors[group.name].append(Tensor(name, tuple(p.shape), plan_dtype_name(name, p.dtype), True, ties))
    units = [UnitDescription(g.name, g.kind, tuple(g.modules), tuple(tensors[g.name])) for g in groups]
    return Description(title, tuple(units))


def abstract(make: Factory) -> nnx.Module:
    """The model with shapes in place of values."""
    if not callable(make) or isinstance(make, nnx.Module):
        raise FullshardError(
            f"a model is made by a function, so that its weights can be made in shards; write lambda rngs: Model(…, rngs=rngs) "
            f"instead of {a_kind(make)}"
        )
    orders: dict[str, list[str]] = {}

    def made() -> nnx.Module:
        model = make(_shape_rngs(0))
        if not isinstance(model, nnx.Module):
            raise FullshardError(f"the function that makes the model returned {a_kind(model)}; return a flax.nnx.Module")
        orders.update({path: list(vars(module)) for path, module in named_modules(model)})
        return model

    try:
        model = nnx.eval_shape(made)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise FullshardError(
            f"the model reads values of its arrays while it is made ({first_line(error)}); use jnp alone"
        ) from None
    for path, module in list(named_modules(model)):
        _reorder(vars(module), orders[path])
    return model


def _shape_rngs(seed: int) -> nnx.Rngs:
    """Random keys for shapes alone: counted by NumPy, all keys of a trace come out equal. NNX's own count is traced, too, and
    adding to it takes time that grows with the operations before: for 126 layers, 19 seconds in place of one."""
    found = nnx.Rngs(seed)
    found.default.count = nnx.RngCount(np.zeros((), np.uint32), tag="default")  # type: ignore[arg-type]
    return found


def _reorder(attributes: dict[str, Any], order: list[str]) -> None:
    """Put attributes back in the order of assignment: `eval_shape` sorts them by name."""
    found = {name: attributes[name] for name in order if name in attributes} | attributes
    attributes.clear()
    attributes.update(found)
