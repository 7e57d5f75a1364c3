"""Carry a plan out on an NNX model: parameters and optimizer state in shards from the first moment on."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fullshard.errors import FullshardError
from fullshard.on_jax.describe import Factory, abstract
from fullshard.on_jax.initial_values import ArrayPrograms, init_rngs
from fullshard.on_jax.jax_dtypes import JAX_DTYPES
from fullshard.on_jax.jax_state import JaxState
from fullshard.on_jax.memory_kinds import refuse_homes
from fullshard.on_jax.module_tree import named_parameters, parameter_names
from fullshard.on_jax.optax_optimizer import make_transformation
from fullshard.on_jax.read_weights import WeightFiles
from fullshard.on_jax.shardings import Shardings, make_mesh, plan_shardings
from fullshard.on_jax.unit_calls import wrap_units
from fullshard.on_jax.unit_updates import parameter_of
from fullshard.optimizer import Optimizer
from fullshard.plan import Plan, Prefetch


def shard(
    make: Factory, plan: Plan, optimizer: Optimizer | None = None, *, seed: int = 0, weights: str | Path | None = None
) -> JaxState:
    """Carry the plan out on the model that `make` returns.

    Initial values are computed one array at a time, where they lie, so that no device or process ever holds the whole model.
    They depend on `seed` alone, not on the sharding. `weights`: a directory of safetensors files to read instead, each process
    its own byte ranges.
    """
    refuse(plan)
    _refuse_stateless(plan, optimizer)
    model = abstract(make)
    shapes = {name: tuple(p.shape) for name, p in named_parameters(model).items()}
    files = None if weights is None else WeightFiles(Path(weights), shapes, parameter_names(model).values())
    shardings = plan_shardings(plan, shapes, make_mesh(plan.mesh))
    wrap_units(model, plan, shardings)
    graph, params, *_ = nnx.split(model, nnx.Param, ...)
    names = {id(p): name for name, p in named_parameters(model).items()}
    paths = {names[id(_at(model, path))]: path for path, _ in nnx.to_flat_state(params)}
    values, rest = _initial_values(make, shardings, paths, plan, seed, read=files is not None)
    if files is not None:
        values = files.arrays(shapes, shardings.at_rest(), JAX_DTYPES[plan.precision.master])
    found = JaxState(plan, optimizer, graph, paths, shardings, values, (), rest, notes=shardings.notes())
    if optimizer is not None:
        _add_moments(found, optimizer)
    found.check()
    return found


def refuse(plan: Plan) -> None:
    """Raise where JAX cannot carry the plan out. Allocates nothing."""
    if plan.precision.compute == "fp16":
        raise FullshardError("precision.compute = 'fp16': the JAX engine has no loss scaling; write 'bf16'")
    if plan.prefetch != Prefetch():
        raise FullshardError(f"prefetch ({plan.prefetch}) has no effect on JAX: XLA schedules gathers itself; leave it out")
    if plan.batch.sync == "last":
        raise FullshardError("batch.sync = 'last': on JAX gradients are reduced after every micro-batch; write 'every'")
    refuse_homes(plan, jax.devices()[0])
    for unit in plan.units:
        if not isinstance(unit.reshard, bool):
            raise FullshardError(
                f"unit {unit.name}: reshard = {unit.reshard}: on JAX parameters are kept or freed; write True or False"
            )


def _at(model: nnx.Module, path: tuple[Any, ...]) -> Any:
    found: Any = model
    for name in path:
        found = vars(found)[str(name)]
    return found


def _initial_values(
    make: Factory, shardings: Shardings, paths: dict[str, tuple[Any, ...]], plan: Plan, seed: int, read: bool
) -> tuple[dict[str, jax.Array], Any]:
    """The values of the model's own code, one array at a time. `read`: those of parameters are not needed, since they come from
    files."""
    master = JAX_DTYPES[plan.precision.master]
    names = {path: name for name, path in paths.items()}

    def init(key: jax.Array) -> tuple[dict[str, jax.Array], Any]:
        _, params, *others = nnx.split(make(init_rngs(key)), nnx.Param, ...)
        return {names[path]: leaf[...].astype(master) for path, leaf in nnx.to_flat_state(params)}, others[0]

    programs, (params, rest) = ArrayPrograms.of(init, jax.random.key(seed))
    values = {} if read else {name: programs.array(params[name], p.rest) for name, p in shardings.parameters.items()}
    return values, jax.tree.map(lambda output: programs.array(output, shardings.everywhere()), rest)


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
