"""The training step on JAX: compiled once, with its buffers donated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from fullshard.base.errors import FullshardError, expect_number
from fullshard.on_jax.communication.hlo_collectives import collectives_of
from fullshard.on_jax.loss.losses import LossFunction, as_loss, summed_loss
from fullshard.on_jax.model.module_tree import scope_of
from fullshard.on_jax.offload.memory_kinds import HostParameter, is_on_host
from fullshard.on_jax.optimizers.optax_optimizer import make_transformation
from fullshard.on_jax.parallelize.shardings import DATA
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.parallelize.unit_calls import gather
from fullshard.on_jax.parallelize.unit_updates import update_units
from fullshard.on_jax.step.compiled_check import check_compiled
from fullshard.on_jax.step.compiled_collectives import CollectiveCheck, compare
from fullshard.on_jax.step.step_check import check_traced
from fullshard.on_jax.step.traced_values import TracedValues
from fullshard.on_jax.tensors.dtypes import JAX_DTYPES

Params = dict[str, jax.Array]


@dataclass(frozen=True)
class JaxStep:
    """The result of one step. Its numbers may still be on the device."""

    index: int
    loss: jax.Array
    grad_norm: jax.Array
    count: jax.Array
    skipped: jax.Array
    metrics: dict[str, jax.Array]
    flagged: jax.Array  # for each of `flags`, whether any process raised it
    norms: jax.Array  # gradient norms by unit, if they were asked for
    units: tuple[str, ...] = ()

    @property
    def unit_norms(self) -> dict[str, jax.Array]:
        """Gradient norms by unit, if they were asked for."""
        return {unit: self.norms[i] for i, unit in enumerate(self.units)}

    def numbers(self) -> list[float]:
        """loss, gradient norm, count, skipped, then one per flag, per metric and per unit norm. Waits for the device once."""
        first = (self.loss, self.grad_norm, self.count, self.skipped)
        *first, flags, means, norms = jax.device_get((*first, self.flagged, list(self.metrics.values()), self.norms))
        return [float(x) for x in (*first, *flags, *means, *norms)]

    def seconds(self) -> dict[str, float]:
        """Nothing: a compiled step is one program, which does not tell its phases apart."""
        return {}


def train_step(
    state: JaxState,
    micro_batches: Sequence[Any],
    *,
    loss: LossFunction = summed_loss,
    clip: float | None = None,
    lr: float | None = None,
    flags: Sequence[bool] = (),
    unit_norms: bool = False,
) -> JaxStep:
    """Forward, backward and update over the plan's micro-batches. Changes the state in place.

    A micro-batch holds the rows of all this process's devices: `plan.batch.micro_batch` for each. The gradient is that of the
    mean loss over all that counts in the step. A step whose gradient is not finite is skipped: it changes no array of the state.
    `flags` are combined over all processes: the result has those that any of them set. `unit_norms`: the result has the gradient
    norm of each unit.
    """
    if state.optimizer is None:
        raise FullshardError("this state has no optimizer; write shard(make, plan, optimizer=fullshard.AdamW(lr=...))")
    if len(micro_batches) != state.plan.batch.accumulate:
        raise FullshardError(f"{len(micro_batches)} micro-batches, but plan.batch.accumulate = {state.plan.batch.accumulate}")
    state.refuse_torn()
    if clip is not None:
        expect_number("train_step: clip", clip, zero=False)
    if lr is not None:
        expect_number("train_step: lr", lr)
    units = _units(state) if unit_norms else ()
    rate = np.float32(state.optimizer.lr if lr is None else lr)
    limit = np.float32(np.inf if clip is None else clip)
    args = (state.params, state.moments, state.rest, placed(state, micro_batches), rate, limit, _flags(state, flags))
    program = _program(state, loss, units)
    if loss not in state.checked:
        _check(state, program.trace(*args))
        state.checked.add(loss)
    state.params, state.moments, state.rest, found = program(*args)
    if state.step == 0:
        state.check()
    state.step += 1
    return JaxStep(state.step, **found, units=units)


def lowered_step(
    state: JaxState, micro_batches: Sequence[Any], *, loss: LossFunction = summed_loss, platform: str | None = None
) -> Any:
    """The step of these batches as XLA gets it: `as_text()` shows it, `compile()` compiles it, if `train_step` did not.
    `platform`: another one than this process's, such as `cuda`, to show what is lowered for it."""
    return traced_step(state, micro_batches, loss).lower(lowering_platforms=None if platform is None else (platform,))


def traced_step(state: JaxState, micro_batches: Sequence[Any], loss: LossFunction) -> Any:
    """The step of these batches as JAX traces it."""
    rate = limit = np.float32(1.0)
    args = (state.params, state.moments, state.rest, placed(state, micro_batches), rate, limit, _flags(state, ()))
    return _program(state, loss).trace(*args)


def check_collectives(state: JaxState, micro_batches: Sequence[Any], *, loss: LossFunction = summed_loss) -> CollectiveCheck:
    """Compile the step of these batches, and compare the bytes of its collectives with the plan's schedule."""
    text = lowered_step(state, micro_batches, loss=loss).compile().as_text()
    return compare(state, collectives_of(text, state.executed.mesh))


def _check(state: JaxState, traced: Any) -> None:
    """Hold a step against the plan, first as traced, then as compiled. The call that follows does neither again."""
    values = TracedValues.of(traced.jaxpr.jaxpr, len(state.params))
    notes = check_traced(state, traced, values)
    notes += check_compiled(state, traced, values, traced.lower().compile())
    state.notes = tuple(dict.fromkeys((*state.notes, *notes)))


def compilations(state: JaxState) -> int:
    """How many steps were compiled for this state."""
    return sum(step._cache_size() for key, step in state.compiled.items() if key[0] == "step")


def placed(state: JaxState, micro_batches: Sequence[Any]) -> Any:
    """The micro-batches as one tree of arrays, with an axis for the micro-batches and the rows spread over the devices."""
    rows = NamedSharding(state.shardings.mesh, PartitionSpec(None, DATA))
    ranks = state.plan.mesh.data

    def place(*leaves: Any) -> jax.Array:
        shapes = {np.shape(leaf) for leaf in leaves}
        if len(shapes) > 1:
            raise FullshardError(
                f"micro-batches of shapes {sorted(map(list, shapes))}; a compiled step needs equal ones: pad the rows"
            )
        local = np.stack([np.asarray(leaf) for leaf in leaves])
        if local.ndim < 2 or local.shape[1] * jax.process_count() % ranks:
            raise FullshardError(
                f"a micro-batch of {local.shape[1] if local.ndim > 1 else 'no'} rows cannot be spread over {ranks} devices; give "
                f"{state.plan.batch.micro_batch} rows for each"
            )
        return jax.make_array_from_process_local_data(rows, local)

    return jax.tree.map(place, *micro_batches)


def _flags(state: JaxState, flags: Sequence[bool]) -> jax.Array:
    """The flags of this process on each of its devices."""
    mesh = state.shardings.mesh
    own = np.array(flags, bool).reshape((1,) * mesh.devices.ndim + (len(flags),))
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    return jax.make_array_from_callback((*mesh.devices.shape, len(flags)), sharding, lambda _: own)


def _units(state: JaxState) -> tuple[str, ...]:
    """The units that have parameters, in the plan's order."""
    held = {p.unit.name for p in state.shardings.parameters.values()}
    return tuple(unit.name for unit in state.plan.units if unit.name in held)


def _norm(grads: Params) -> jax.Array:
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))


def _program(state: JaxState, loss: LossFunction, units: tuple[str, ...] = ()) -> Any:
    """The step for a loss. There is one, so that XLA compiles it once, whoever asks for it."""
    key = ("step", loss, units)
    if key not in state.compiled:
        state.compiled[key] = _compile(state, loss, units)
    return state.compiled[key]


def _compile(state: JaxState, loss: LossFunction, units: tuple[str, ...] = ()) -> Any:
    """The step as a compiled function of (params, moments, rest, batches, learning rate, clip, flags). `units`: those whose
    gradient norms it computes."""
    assert state.optimizer is not None
    transformation, accumulate = make_transformation(state.optimizer), state.plan.batch.accumulate

    def total(params: Params, host: Params, rest: Any, batch: Any) -> tuple[jax.Array, Any]:
        model = state.merge(params | {n: HostParameter(p, params[n]) for n, p in host.items()}, rest)
        found = as_loss(loss(model, batch), batch)
        return found.sum, (found.sum, found.count, found.metrics, nnx.state(model, nnx.Not(nnx.Param)))

    def one(params: Params, whole: Params, host: Params, rest: Any, batch: Any) -> tuple[Params, Any]:
        """Gradients of the summed loss of a micro-batch, those of units with layout `optimizer` reduced to shards."""
        # A gradient has the dtype of what is differentiated: it is added up in the master's. XLA leaves the two casts out.
        wide = {n: w.astype(params[n].dtype) for n, w in whole.items()}
        grads, found = jax.grad(total, has_aux=True)(params | wide, host, rest, batch)
        return grads | _reduced(state, {n: grads[n] for n in whole}), found

    def gradients(
        params: Params, whole: Params, host: Params, rest: Any, batches: Any
    ) -> tuple[Params, jax.Array, jax.Array, Any, Any]:
        """Gradients of the summed loss, and the sums, over all micro-batches."""

        def add(carry: Any, batch: Any) -> tuple[Any, None]:
            sums, rest = carry
            # Without this tie, XLA would gather parameters before the loop and keep them in memory for all of it.
            own = {n: p for n, p in params.items() if n not in whole}
            own, away, batch = jax.lax.optimization_barrier((own, host, batch))
            grads, (value, count, metrics, rest) = one(
                params | _in_shards(state, own), whole, _in_shards(state, away), rest, batch
            )
            return (jax.tree.map(jnp.add, sums, (grads, value, count, metrics)), rest), None

        first = jax.tree.map(lambda x: x[0], batches)
        if accumulate == 1:
            grads, (value, count, metrics, rest) = one(params, whole, host, rest, first)
            return grads, value, count, metrics, rest
        shapes = jax.eval_shape(one, params, whole, host, rest, first)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0], *shapes[1][:3]))
        (sums, rest), _ = jax.lax.scan(add, (zeros, rest), batches)
        return (*sums, rest)

    def step(params: Params, moments: Any, rest: Any, batches: Any, rate: jax.Array, clip: jax.Array, flags: jax.Array) -> Any:
        whole = _gathered_once(state, params)
        host = {n: p for n, p in params.items() if n not in whole and is_on_host(p)}
        zeros = {n: jnp.zeros(p.shape, p.dtype) for n, p in params.items() if is_on_host(p)}
        grads, value, count, metrics, moved = gradients(params | zeros, whole, host, rest, batches)
        divisor = jnp.where(count > 0, count, 1.0)
        grads = {n: (g / divisor).astype(params[n].dtype) for n, g in grads.items()}
        norm, owner = _norm(grads), {n: p.unit.name for n, p in state.shardings.parameters.items()}
        norms = [_norm({n: g for n, g in grads.items() if owner[n] == unit}) for unit in units]
        factor = jnp.minimum(clip / (norm + 1e-6), 1.0)
        grads = jax.tree.map(lambda g: g * factor, grads)
        skipped = ~jnp.isfinite(norm)
        homes = state.moment_shardings
        stepped, changed = update_units(state.shardings, transformation, grads, moments, homes, params, rate, skipped)
        means = {name: total / jnp.where(of > 0, of, 1.0) for name, (total, of) in metrics.items()}
        found = {"loss": value / divisor, "grad_norm": norm, "count": count, "skipped": skipped, "metrics": means}
        found |= {"flagged": flags.any((0, 1, 2)), "norms": jnp.array(norms)}
        # Statistics of batches and counters of dropout have moved in forward already.
        return stepped, changed, jax.tree.map(lambda old, new: jnp.where(skipped, old, new), rest, moved), found

    everywhere = state.shardings.everywhere()
    kept = jax.tree.map(lambda _: everywhere, state.rest)
    out = (state.shardings.at_rest(), state.moment_shardings, kept, everywhere)
    return jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=out)


def _gathered_once(state: JaxState, params: Params) -> Params:
    """Parameters of units with layout `optimizer`, gathered for the whole step in the compute dtype."""
    found, precision = {}, state.plan.precision
    for name, p in params.items():
        sharding = state.shardings.parameters[name]
        if sharding.unit.layout == "optimizer":
            with jax.named_scope(scope_of(sharding.unit.name)):
                found[name] = gather(p, sharding, precision.compute)
    return found


def _in_shards(state: JaxState, params: Params) -> Params:
    """The parameters, said to lie in shards. Otherwise XLA takes what backward gathers them from to be gathered already, and
    keeps it from forward on."""
    at = state.shardings.parameters
    return {n: jax.lax.with_sharding_constraint(p, at[n].rest if is_on_host(p) else at[n].shard) for n, p in params.items()}


def _reduced(state: JaxState, grads: Params) -> Params:
    """Gradients of a micro-batch, reduced to shards in the reduce dtype."""
    found, dtype = {}, JAX_DTYPES[state.plan.precision.reduce]
    for name, grad in grads.items():
        sharding = state.shardings.parameters[name]
        with jax.named_scope(scope_of(sharding.unit.name)):
            found[name] = jax.lax.with_sharding_constraint(grad.astype(dtype), sharding.shard).astype(grad.dtype)
    return found
