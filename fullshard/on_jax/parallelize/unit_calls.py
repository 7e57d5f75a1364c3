"""Modules of a unit gather their parameters when they are called.

Left alone, XLA would keep weights sharded and move activations instead. Here a constraint makes the weights whole, in the
compute dtype, inside the call; its gradient is constrained to the shards again, in the reduce dtype. What backward keeps and
what it gathers or computes again is the policy of a `jax.checkpoint` around the call.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fullshard.on_jax.model.module_tree import module_at, named_parameters, scope_of
from fullshard.on_jax.offload.activation_offload import offloading
from fullshard.on_jax.offload.memory_kinds import HostParameter, is_on_host
from fullshard.on_jax.parallelize.shardings import ParameterSharding, Shardings
from fullshard.on_jax.tensors.dtypes import JAX_DTYPES
from fullshard.plan.plan import Home, Plan, Unit

GATHERED = "gathered"  # the name of gathered parameters in policies
# What backward does again rather than keep: the primitives of a gather, and those that only show a tensor in another way, since
# keeping what one of them returns would keep the gathered parameter.
GATHERING = ("sharding_constraint", "device_put", "custom_vjp_call", "custom_vjp_call_jaxpr")
VIEWS = ("transpose", "reshape", "convert_element_type", "broadcast_in_dim", "squeeze", "expand_dims")
Policy = Callable[..., bool]


@dataclass(frozen=True)
class UnitCall:
    """What the call of a module of a unit does besides. `shardings`: of its parameters, by their path inside the module."""

    unit: Unit
    shardings: tuple[tuple[str, ParameterSharding], ...]
    compute: str
    reduce: str
    ordered: bool = False  # its gradients are computed before backward goes on
    looped: bool = False  # it is called in a compiled loop, which keeps forward and backward apart by itself

    def __call__(self, forward: Callable[..., Any], module: nnx.Module, args: Any, kwargs: Any) -> Any:
        """What `forward`, a method of the module's own class, returns."""
        graph, params, *others = nnx.split(module, nnx.Param, ...)
        (rest,) = others
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [leaf if isinstance(leaf, jax.Array) else None for leaf in leaves]
        fixed: list[Any] = []  # of what is returned, all but the arrays

        def run(params: Any, rest: Any, traced: list[Any]) -> Any:
            with jax.named_scope(scope_of(self.unit.name)):
                whole = self._gathered(params)
                whole, traced = _in_order((whole, traced)) if self.ordered else (whole, traced)
                inner: Any = nnx.merge(graph, whole, rest)
                inner.fullshard_inside = True
                given = [leaf if t is None else t for t, leaf in zip(traced, leaves, strict=True)]
                args, kwargs = jax.tree.unflatten(tree, given)
                found, form = jax.tree.flatten(forward(inner, *args, **kwargs))
            fixed[:] = [form, *(None if isinstance(x, jax.Array) else x for x in found)]
            return [x if isinstance(x, jax.Array) else None for x in found], nnx.state(inner, nnx.Not(nnx.Param))

        policy = self._policy()
        call = run if policy is None else jax.checkpoint(run, policy=policy, prevent_cse=not self.looped)
        if self.unit.home.activations == "host":
            call = offloading(call, frozenset(tuple(p.shape) for p in jax.tree.leaves(params)))
        out, changed = call(params, rest, traced)
        nnx.update(module, changed)
        form, *others = fixed
        return jax.tree.unflatten(form, [x if y is None else y for x, y in zip(out, others, strict=True)])

    def _gathered(self, params: Any) -> Any:
        by_path = dict(self.shardings)

        def gather_leaf(path: Any, leaf: Any) -> Any:
            sharding = by_path.get(".".join(str(p) for p in path))
            return leaf if sharding is None else leaf.replace(gathered(leaf.get_value(), sharding, self.compute, self.reduce))

        flat = nnx.to_flat_state(params)
        return nnx.from_flat_state([(path, gather_leaf(path, leaf)) for path, leaf in flat])

    def _policy(self) -> Policy | None:
        """What backward keeps; None if it keeps all."""
        keeps = self.unit.reshard is False
        match self.unit.remat:
            case "full":
                return _gathers_only if keeps else jax.checkpoint_policies.nothing_saveable
            case "selective":
                return _products_and_gathers if keeps else jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return None if keeps else _all_but_gathers


def _gathers_only(prim: Any, *_: Any, **params: Any) -> bool:
    return prim.name == "name" and params["name"] == GATHERED


def _all_but_gathers(prim: Any, *_: Any, **params: Any) -> bool:
    return not (prim.name in (*GATHERING, *VIEWS) or _gathers_only(prim, **params))


def _products_and_gathers(prim: Any, *inputs: Any, **params: Any) -> bool:
    return bool(
        _gathers_only(prim, **params) or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *inputs, **params)
    )


def gathered(x: jax.Array | HostParameter, sharding: ParameterSharding, compute: str, reduce: str) -> jax.Array:
    """The parameter as its unit computes with it: whole along the shard axis, in the compute dtype."""
    if sharding.unit.layout == "optimizer" and not isinstance(x, HostParameter):  # gathered for the whole step already
        return (jax.device_put(x, sharding.gathered) if is_on_host(x) else x).astype(JAX_DTYPES[compute])
    value, differentiated = (x.value, x.zeros) if isinstance(x, HostParameter) else (x, x)
    return checkpoint_name(_gather(differentiated, value, sharding, compute, reduce), GATHERED)


def gather(value: jax.Array, sharding: ParameterSharding, compute: str) -> jax.Array:
    """The parameter whole along the shard axis, in the compute dtype. Its gradient is not for use."""
    if is_on_host(value):
        value = jax.device_put(value, sharding.shard)
    # Without the first constraint XLA may cast after it gathered, and gather a parameter for all micro-batches at once.
    own = jax.lax.with_sharding_constraint(value.astype(JAX_DTYPES[compute]), sharding.shard)
    return jax.lax.with_sharding_constraint(own, sharding.gathered)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _gather(x: jax.Array, value: jax.Array, sharding: ParameterSharding, compute: str, reduce: str) -> jax.Array:
    """The gathered `value`; its gradient is that of `x`."""
    return gather(value, sharding, compute)


def _gather_forward(
    x: jax.Array, value: jax.Array, sharding: ParameterSharding, compute: str, reduce: str
) -> tuple[jax.Array, jax.Array]:
    return _gather(x, value, sharding, compute, reduce), jnp.zeros((), x.dtype)


def _gather_backward(
    sharding: ParameterSharding, compute: str, reduce: str, like: jax.Array, grad: jax.Array
) -> tuple[jax.Array, None]:
    reduced = jax.lax.with_sharding_constraint(grad.astype(JAX_DTYPES[reduce]), sharding.shard)
    return reduced.astype(like.dtype), None


_gather.defvjp(_gather_forward, _gather_backward)


@jax.custom_vjp
def _in_order(both: tuple[Any, Any]) -> tuple[Any, Any]:
    """Gathered parameters and inputs of a unit, unchanged. In backward none of their gradients goes on before all are computed.
    Otherwise XLA, in programs with copies between host and device, puts the matrix products that are gradients of weights after
    the whole backward, and keeps the inputs of all of them until then."""
    return both


def _in_order_backward(_: None, grads: tuple[Any, Any]) -> tuple[tuple[Any, Any]]:
    leaves, tree = jax.tree.flatten(grads)
    floats = [x.dtype != jax.dtypes.float0 for x in leaves]
    tied = iter(jax.lax.optimization_barrier([x for x, f in zip(leaves, floats, strict=True) if f]))
    return (jax.tree.unflatten(tree, [next(tied) if f else x for x, f in zip(leaves, floats, strict=True)]),)


_in_order.defvjp(lambda both: (both, None), _in_order_backward)


def wrap_units(model: nnx.Module, plan: Plan, shardings: Shardings) -> None:
    """Give every module of a unit calls that gather its parameters. `model` may be abstract."""
    names = {id(p): name for name, p in named_parameters(model).items()}  # a tied parameter has its first name everywhere
    paths = [(unit, path) for unit in plan.units for path in unit.modules]
    ordered = any(unit.home != Home() for unit in plan.units)
    for unit, path in sorted(paths, key=lambda found: -len(found[1])):  # the inner ones first
        module: Any = module_at(model, path)
        own = [(name, shardings.parameters[names[id(p)]]) for name, p in named_parameters(module).items()]
        mine = tuple((name, sharding) for name, sharding in own if sharding.unit == unit)
        module.fullshard_call = UnitCall(unit, mine, plan.precision.compute, plan.precision.reduce, ordered)
        object.__setattr__(module, "__class__", _wrapped(type(module)))  # type: ignore[arg-type]


def loop_call(block: Any, unit: Unit) -> None:
    """Let a wrapped block be the body of a compiled loop over the blocks of `unit`."""
    block.fullshard_call = replace(block.fullshard_call, unit=unit, looped=True)


@functools.cache
def _wrapped(cls: type) -> type:
    """The class with its methods called as units are."""
    methods = {name: _unit_method(name, method) for name, method in _methods(cls)}
    return type(cls)(cls.__name__, (cls,), {**methods, "__module__": cls.__module__, "__doc__": cls.__doc__})


def _methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods by which a module may be called: `__call__`, and the public ones that NNX's own module has not."""
    own = {name: value for base in reversed(cls.__mro__) if base not in nnx.Module.__mro__ for name, value in vars(base).items()}
    for name, method in own.items():
        is_public = name == "__call__" or not (name.startswith("_") or hasattr(nnx.Module, name))
        if is_public and inspect.isfunction(method) and not inspect.isgeneratorfunction(method):
            yield name, method


def _unit_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that computes as its unit does. One that calls another one inside has gathered already; and one that gets no
    array computes nothing: it may change the module's settings."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        computes = name == "__call__" or any(isinstance(x, jax.Array) for x in jax.tree.leaves((args, kwargs)))
        if hasattr(self, "fullshard_inside") or not computes:
            return method(self, *args, **kwargs)
        return self.fullshard_call(method, self, args, kwargs)

    return call
