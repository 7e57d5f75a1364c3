"""Carry a plan out on an NNX model: parameters and optimizer state in shards from the first moment on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fullshard.base.errors import FullshardError
from fullshard.base.status import tell
from fullshard.base.text import bytes_text
from fullshard.model.description import ITEM_BYTES
from fullshard.on_jax.model.describe import Factory, abstract
from fullshard.on_jax.model.initial_values import ArrayPrograms, init_rngs
from fullshard.on_jax.model.layer_dtypes import refuse_other_dtypes, set_dtypes
from fullshard.on_jax.model.module_tree import module_at, named_parameters, parameter_names
from fullshard.on_jax.model.read_weights import WeightFiles
from fullshard.on_jax.model.scanned_layers import Stack, find_stacks, is_stacked, layer_names, stack_blocks, stacked_variables
from fullshard.on_jax.offload.memory_kinds import refuse_homes
from fullshard.on_jax.optimizers.optax_optimizer import make_transformation
from fullshard.on_jax.parallelize.shardings import ParameterSharding, Shardings, make_mesh, plan_shardings
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.parallelize.unit_calls import loop_call, wrap_units
from fullshard.on_jax.parallelize.unit_updates import parameter_of
from fullshard.on_jax.ranks.jax_devices import known_device
from fullshard.on_jax.tensors.dtypes import JAX_DTYPES
from fullshard.on_jax.tensors.stacked_arrays import stacked_array, stacked_sharding
from fullshard.plan.choice_table import refuse_limits
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan, Unit
from fullshard.planner.device_limits import slow_precision


def shard(
    make: Factory,
    plan: Plan,
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    weights: str | Path | None = None,
    scan: bool | None = None,
) -> JaxState:
    """Carry the plan out on the model that `make` returns.

    Initial values are computed one array at a time, where they lie, so that no device or process ever holds the whole model.
    They depend on `seed` alone, not on the sharding. `weights`: a directory of safetensors files to read instead, each process
    its own byte ranges. `scan`: compile equal blocks once, as a loop; the model calls them by `scan_layers`. By default as
    `load_model` was told.
    """
    refuse(plan)
    _refuse_stateless(plan, optimizer)
    model = abstract(make)
    refuse_other_dtypes(model, plan)
    set_dtypes(model, plan)
    stacks = find_stacks(model) if (getattr(make, "scan", False) if scan is None else scan) else ()
    units = [stack.unit(plan) for stack in stacks]
    shapes = {name: tuple(p.shape) for name, p in named_parameters(model).items()}
    files = None if weights is None else WeightFiles(Path(weights), shapes, parameter_names(model).values())
    layers = plan_shardings(plan, shapes, make_mesh(plan.mesh))
    shardings = _stacked_shardings(layers, units)
    wrap_units(model, plan, layers)
    names = _names_by_path(model)
    for unit in units:
        loop_call(module_at(model, unit.modules[0]), unit)
    stack_blocks(model, stacks)
    master = JAX_DTYPES[plan.precision.master]
    made, rest = _initial_values(make, layers, names, master, seed, stacks)
    value = made if files is None else lambda n: files.array(n, shapes[n], layers.parameters[n].rest, master)
    params = {name: _joined(value, name, stacks, p) for name, p in shardings.parameters.items()}
    paths = {name: path for path, name in _names_by_path(model).items()}
    graph = nnx.split(model)[0]
    found = JaxState(plan, optimizer, graph, paths, shardings, params, (), rest, stacks=stacks)
    platform = shardings.mesh.devices.flat[0].platform
    found.notes = (*shardings.notes(), *_variable_notes(plan, rest), *_reduce_notes(plan, platform))
    if (slow := slow_precision(plan.precision, known_device(shardings.mesh.devices.flat[0]))) and jax.process_index() == 0:
        tell(slow)
    if optimizer is not None:
        _add_moments(found, optimizer)
    found.check()
    return found


def refuse(plan: Plan) -> None:
    """Raise where JAX cannot carry the plan out. Allocates nothing."""
    refuse_limits(plan, "jax")
    refuse_homes(plan, jax.devices()[0])


def _variable_notes(plan: Plan, rest: Any) -> tuple[str, ...]:
    """What is no parameter and not sharded, although the plan shards."""
    flat = nnx.to_flat_state(rest)
    sizes = {".".join(map(str, path)): v.get_value().nbytes for path, v in flat if not isinstance(v, nnx.RngState)}
    if not sizes or plan.mesh.shard == 1:
        return ()
    more = f" and {len(sizes) - 1} more are no parameters" if len(sizes) > 1 else " is no parameter"
    return (f"{next(iter(sizes))}{more}: {bytes_text(sum(sizes.values()))} stay whole on every device",)


def _reduce_notes(plan: Plan, platform: str) -> tuple[str, ...]:
    """Where gradients are reduced in another dtype than the plan says. On a CPU XLA computes products in fp32."""
    compute, reduce = plan.precision.compute, plan.precision.reduce
    if platform == "cpu" or plan.mesh.data == 1 or ITEM_BYTES[compute] >= ITEM_BYTES[reduce]:
        return ()
    return (
        f"gradients of weights are reduced in {compute}, not {reduce}: XLA adds up products of several devices in their dtype",
    )


def _names_by_path(model: nnx.Module) -> dict[tuple[Any, ...], str]:
    """The names of parameters by their paths in the graph."""
    names = {id(p): name for name, p in named_parameters(model).items()}
    _, params, *_ = nnx.split(model, nnx.Param, ...)
    return {path: names[id(_at(model, path))] for path, _ in nnx.to_flat_state(params)}


def _at(model: nnx.Module, path: tuple[Any, ...]) -> Any:
    found: Any = model
    for name in path:
        found = vars(found)[str(name)]
    return found


def _stacked_shardings(layers: Shardings, units: list[Unit]) -> Shardings:
    """The shardings with scanned blocks as one. `units`: of each stack."""
    stack_of = {module: unit for unit in units for module in unit.modules}
    found: dict[str, ParameterSharding] = {}
    for name, p in layers.parameters.items():
        if (unit := stack_of.get(p.unit.modules[0])) is None:
            found[name] = p
        elif p.unit.modules[0] == unit.modules[0]:
            inner = name.removeprefix(f"{unit.modules[0]}.")
            both = stacked_sharding(p.shard), stacked_sharding(p.gathered)
            found[f"{unit.name}.{inner}"] = ParameterSharding(unit, *both, p.whole)
    return Shardings(layers.mesh, found)


def _initial_values(
    make: Factory, layers: Shardings, names: dict[tuple[Any, ...], str], master: Any, seed: int, stacks: tuple[Stack, ...]
) -> tuple[Callable[[str], jax.Array], Any]:
    """The values of the model's own code: a function that computes a parameter, and all other variables."""

    def init(key: jax.Array) -> tuple[dict[str, jax.Array], Any]:
        _, params, *others = nnx.split(make(init_rngs(key)), nnx.Param, ...)
        return {names[path]: leaf[...].astype(master) for path, leaf in nnx.to_flat_state(params)}, others[0]

    programs, (params, rest) = ArrayPrograms.of(init, jax.random.key(seed))
    values = jax.tree.map(lambda output: programs.array(output, layers.everywhere()), rest)
    compute = lambda name: programs.array(params[name], layers.parameters[name].rest)
    return compute, stacked_variables(values, stacks, layers.everywhere())


def _joined(value: Callable[[str], jax.Array], name: str, stacks: tuple[Stack, ...], p: ParameterSharding) -> jax.Array:
    """A parameter: one of a stack from those of its layers."""
    if not is_stacked(name):
        return value(name)
    names = layer_names(stacks, name)
    return stacked_array(map(value, names), len(names), p.rest)


def _add_moments(state: JaxState, optimizer: Optimizer) -> None:
    """The optimizer's state, sharded as the parameters are, in the memory that the plan says."""
    start, shardings = make_transformation(optimizer).init, state.shardings
    zeros = lambda: start({n: jnp.zeros(p.shape, p.dtype) for n, p in state.params.items()})

    def sharding(path: Any, leaf: Any) -> jax.sharding.NamedSharding:
        p = shardings.parameters.get(parameter_of(path))
        return shardings.everywhere() if p is None or not leaf.ndim else p.state

    state.moment_shardings = jax.tree.map_with_path(sharding, jax.eval_shape(zeros))
    state.moments = jax.jit(zeros, out_shardings=state.moment_shardings)()


def _refuse_stateless(plan: Plan, optimizer: Optimizer | None) -> None:
    """Raise if there is no state that could rest on the host."""
    away = next((u.name for u in plan.units if u.home.optimizer != "device"), None)
    if away is None or optimizer is None:
        return
    state = jax.eval_shape(make_transformation(optimizer).init, {"x": jax.ShapeDtypeStruct((1,), jnp.float32)})
    if all(leaf.ndim == 0 for leaf in jax.tree.leaves(state)):
        raise FullshardError(f"unit {away}: home.optimizer = 'host' has no effect: {optimizer} has no state; write 'device'")
