"""The optimizer's update. Units whose parameters or state rest on the host are updated one after another."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fullshard.on_jax.offload.memory_kinds import HOST, is_on_host
from fullshard.on_jax.parallelize.shardings import Shardings
from fullshard.plan.plan import Unit

Params = dict[str, jax.Array]
AHEAD = 2  # units whose state may be on the device at a time: one is updated, the next is copied


def update_units(
    shardings: Shardings,
    transformation: optax.GradientTransformation,
    grads: Params,
    moments: Any,
    homes: Any,
    params: Params,
    rate: jax.Array,
    skipped: jax.Array,
) -> tuple[Params, Any]:
    """The new parameters and optimizer state, each in the memory of its home. With `skipped` they are the old ones. `homes`: the
    shardings of the optimizer state."""
    keep = lambda old, new: jnp.where(skipped, old, new)
    done: list[tuple[Params, Any]] = []
    for i, names in enumerate(_groups(shardings, {n: p.shape for n, p in params.items()})):
        own = {n: params[n] for n in names}, _part(moments, names)
        if any(is_on_host(x) for x in jax.tree.leaves(own)):
            # The copy of this unit's state to the device waits for the end of backward, then for an earlier unit's update.
            if i < AHEAD:
                own, _ = jax.lax.optimization_barrier((own, skipped))
            else:
                own, done[i - AHEAD] = jax.lax.optimization_barrier((own, done[i - AHEAD]))
        old, state = _on_device(shardings, own)
        updates, changed = transformation.update({n: grads[n] for n in names}, state, old)
        stepped = {n: keep(p, (p - rate * updates[n]).astype(p.dtype)) for n, p in old.items()}
        done.append((stepped, jax.tree.map(keep, state, changed)))
    found = _joined([p for p, _ in done]), _joined([m for _, m in done])
    return _at_home(found, ({n: shardings.parameters[n].rest for n in found[0]}, homes))


def _groups(shardings: Shardings, shapes: dict[str, tuple[int, ...]]) -> list[list[str]]:
    """Names of parameters that are updated at once: all that rest on the device, and those of every other unit, the smallest
    units first: XLA may copy the state of the first two before their gradients are there."""
    resident: list[str] = []
    away: dict[Unit, list[str]] = {}
    for name, p in shardings.parameters.items():
        on_host = "host" in (p.unit.home.params, p.unit.home.optimizer)
        (away.setdefault(p.unit, []) if on_host else resident).append(name)
    size = lambda names: sum(math.prod(shapes[n]) for n in names)
    return [names for names in (resident, *sorted(away.values(), key=size)) if names]


def _part(moments: Any, names: list[str]) -> Any:
    """The optimizer state of some parameters. What is not by parameter, such as the count of steps, is in every part."""
    own = lambda x: {n: x[n] for n in names} if isinstance(x, dict) else x
    return jax.tree.map(own, moments, is_leaf=lambda x: isinstance(x, dict))


def _joined(parts: list[Any]) -> Any:
    join = lambda *xs: {n: v for x in xs for n, v in x.items()} if isinstance(xs[0], dict) else xs[0]
    return jax.tree.map(join, *parts, is_leaf=lambda x: isinstance(x, dict))


def _on_device(shardings: Shardings, own: tuple[Params, Any]) -> tuple[Params, Any]:
    def move(path: Any, x: jax.Array) -> jax.Array:
        return jax.device_put(x, shardings.parameters[parameter_of(path)].shard) if is_on_host(x) else x

    return jax.tree.map_with_path(move, own)


def _at_home(found: Any, homes: Any) -> Any:
    """The arrays, moved to the host where these shardings say so."""
    return jax.tree.map(lambda x, home: jax.device_put(x, home) if home.memory_kind == HOST else x, found, homes)


def parameter_of(path: Any) -> str:
    """The parameter that a leaf of the optimizer's state belongs to; nothing if it belongs to all."""
    keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
    return str(keys[-1]) if keys else ""
