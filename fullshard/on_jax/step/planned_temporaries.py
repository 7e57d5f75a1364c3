"""The most memory that a step of the plan needs besides its arguments: gradients, gathered parameters and activations.

A bound for every model, from the shapes of the traced step. `planner.memory` estimates closer where a model's costs are known.
"""

import math

import jax

from fullshard.model.description import ITEM_BYTES
from fullshard.on_jax.model.scanned_layers import is_stacked
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.step.traced_values import TracedValues

AT_ONCE = (
    2  # units that are fetched or cast, or results that are computed with, at a time: the next one comes before the last goes
)


def planned_temporaries(state: JaxState, values: TracedValues) -> dict[str, int]:
    """Bytes of a device by kind. `values`: of the step, all devices together."""
    found = {"gradients": _gradients(state), "parameters": _parameters(state), "activations": _activations(state, values)}
    return {kind: math.ceil(nbytes) for kind, nbytes in found.items()}


def _gradients(state: JaxState) -> int:
    """Shards in the master's dtype: the sum, and those of a micro-batch that are added to it."""
    item = ITEM_BYTES[state.plan.precision.master]
    shards = sum(item * math.prod(p.shard.shard_shape(state.params[n].shape)) for n, p in state.shardings.parameters.items())
    return shards * (2 if state.plan.batch.accumulate > 1 else 1)


def _parameters(state: JaxState) -> int:
    """Gathered or cast, with whole gradients before and after they are reduced, and what is fetched from the host. Of several
    devices these are of all units: when XLA gathers and reduces is its scheduler's choice, which on a CPU is at once."""
    compute, reduce = _compute_bytes(state), ITEM_BYTES[state.plan.precision.reduce]
    kept, working, fetched = 0, dict[str, int](), dict[str, int]()
    for name, p in state.shardings.parameters.items():
        shape, unit = state.params[name].shape, p.unit
        numel = math.prod(p.gathered.shard_shape(shape))
        kept += numel * compute if unit.reshard is False or unit.layout == "optimizer" else 0
        each = numel // (shape[0] if is_stacked(name) else 1)
        working[unit.name] = working.get(unit.name, 0) + each * (compute + 2 * reduce)
        if state.plan.mesh.devices > 1:
            kept += numel * (compute + 2 * reduce)
        if "host" in (unit.home.params, unit.home.optimizer):
            shard = math.prod(p.shard.shard_shape(shape)) * ITEM_BYTES[state.plan.precision.master]
            fetched[unit.name] = fetched.get(unit.name, 0) + 3 * shard  # with Adam's moments
    return kept + _largest(working) + _largest(fetched)


def _compute_bytes(state: JaxState) -> int:
    """Of an element that is computed with: XLA on a CPU has an fp32 copy of what is narrower."""
    item = ITEM_BYTES[state.plan.precision.compute]
    return item + 4 if item < 4 and jax.default_backend() == "cpu" else item


def _activations(state: JaxState, values: TracedValues) -> float:
    """What the traced step keeps for backward, which is as the plan says, and what it computes with at a time."""
    working = AT_ONCE * max((v.largest for v in values.units.values()), default=0)
    # XLA on a CPU begins what is to be computed again before backward is there, and fuses little.
    on_cpu = jax.default_backend() == "cpu"
    held = sum(v.results if on_cpu else v.kept for v in values.units.values())
    wider = _compute_bytes(state) / ITEM_BYTES[state.plan.precision.compute]
    return (held + working) * wider / state.plan.mesh.data


def _largest(units: dict[str, int]) -> int:
    return sum(sorted(units.values())[-AT_ONCE:])
