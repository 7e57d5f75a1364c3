"""Carry a plan out on an NNX model: parameters and optimizer state in shards from the first moment on."""

from pathlib import Path
from typing import Any

import jax
from flax import nnx

from fullshard.errors import FullshardError
from fullshard.on_jax.describe import Factory, abstract
from fullshard.on_jax.jax_dtypes import JAX_DTYPES
from fullshard.on_jax.jax_state import JaxState
from fullshard.on_jax.module_tree import named_parameters, parameter_names
from fullshard.on_jax.optax_optimizer import make_transformation
from fullshard.on_jax.read_weights import WeightFiles
from fullshard.on_jax.shardings import Shardings, make_mesh, plan_shardings
from fullshard.on_jax.unit_calls import wrap_units
from fullshard.optimizer import Optimizer
from fullshard.plan import Home, Plan, Prefetch


def shard(
    make: Factory, plan: Plan, optimizer: Optimizer | None = None, *, seed: int = 0, weights: str | Path | None = None
) -> JaxState:
    """Carry the plan out on the model that `make` returns.

    Initial values are computed where they lie, so that no device ever holds the whole model. They depend on `seed` alone, not
    on the sharding. `weights`: a directory of safetensors files to read instead, each process its own byte ranges.
    """
    refuse(plan)
    model = abstract(make)
    shapes = {name: tuple(p.shape) for name, p in named_parameters(model).items()}
    files = None if weights is None else WeightFiles(Path(weights), shapes, parameter_names(model).values())
    shardings = plan_shardings(plan, shapes, make_mesh(plan.mesh))
    wrap_units(model, plan, shardings)
    graph, params, *others = nnx.split(model, nnx.Param, ...)
    (rest,) = others
    names = {id(p): name for name, p in named_parameters(model).items()}
    paths = {names[id(_at(model, path))]: path for path, _ in nnx.to_flat_state(params)}
    values, rest = _initial_values(make, shardings, paths, rest, plan, seed, read=files is not None)
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
    for unit in plan.units:
        if unit.home != Home():
            raise FullshardError(
                f"unit {unit.name}: home = {unit.home}: the JAX engine keeps everything on the device; write Home()"
            )
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
    make: Factory, shardings: Shardings, paths: dict[str, tuple[Any, ...]], rest: Any, plan: Plan, seed: int, read: bool
) -> tuple[dict[str, jax.Array], Any]:
    """The values of the model's own code, each computed on the devices that hold it. `read`: those of parameters are not needed,
    since they come from files."""
    master = JAX_DTYPES[plan.precision.master]
    names = {path: name for name, path in paths.items()}

    def init(key: jax.Array) -> tuple[dict[str, jax.Array], Any]:
        _, params, *others = nnx.split(make(nnx.Rngs(key)), nnx.Param, ...)
        flat = nnx.to_flat_state(params)
        return {} if read else {names[path]: leaf[...].astype(master) for path, leaf in flat}, others[0]

    everywhere = jax.tree.map(lambda _: shardings.everywhere(), rest)
    made = jax.jit(init, out_shardings=({} if read else shardings.at_rest(), everywhere))
    return made(jax.random.key(seed))


def _add_moments(state: JaxState, optimizer: Optimizer) -> None:
    """The optimizer's state, sharded as the parameters are."""
    start = make_transformation(optimizer).init
    shapes = jax.eval_shape(start, state.params)
    by_name = state.shardings.at_rest()

    def sharding(path: Any, leaf: Any) -> jax.sharding.NamedSharding:
        name = next((k.key for k in reversed(path) if isinstance(k, jax.tree_util.DictKey) and k.key in by_name), None)
        return state.shardings.everywhere() if name is None or not leaf.ndim else by_name[name]

    state.moment_shardings = jax.tree.map_with_path(sharding, shapes)
    state.moments = jax.jit(start, out_shardings=state.moment_shardings)(state.params)
