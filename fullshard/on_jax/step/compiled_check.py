"""The first step against the plan, once it is compiled: what contradicts the plan is refused, what is far off is noted."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text, count_text
from fullshard.model.description import ITEM_BYTES
from fullshard.on_jax.communication.hlo_collectives import collectives_of
from fullshard.on_jax.communication.kept_gathers import kept_gathers
from fullshard.on_jax.communication.loop_values import alike, loop_values
from fullshard.on_jax.parallelize.shardings import ParameterSharding
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.parallelize.unit_updates import parameter_of
from fullshard.on_jax.step.compiled_collectives import CollectiveCheck, compare
from fullshard.on_jax.step.planned_temporaries import planned_temporaries
from fullshard.on_jax.step.traced_flops import traced_flops
from fullshard.on_jax.step.traced_values import TracedValues

TRAFFIC = 0.05  # of all that a step should move: what a unit has to move besides to be noted
TIMES = 2.0  # and how many times what it should. A tied head gathers its table three times, not twice
OLD = 0.01  # of the state: what may not be updated in place
SPARE = {"cpu": 64 << 10, "gpu": 256 << 20}  # bytes that XLA takes for itself: copies of small arrays, workspaces of products
WORK = 1.75  # times a device's share of the work: what it has to compute to be noted


def check_compiled(state: JaxState, traced: Any, values: TracedValues, compiled: Any) -> tuple[str, ...]:
    """Raise where a compiled step does not do what the plan says. Returns notes on what it does otherwise. `traced`: the step
    that it was compiled from; `values`: what that computes and keeps."""
    _refuse_whole(state, *compiled.output_shardings[:2])
    memory = compiled.memory_analysis()
    notes = [*_old_state(state, memory), *_needed(state, values, memory)]
    if state.executed.mesh.devices == 1:
        return tuple(notes)
    text, temporaries = compiled.as_text(), memory.temp_size_in_bytes
    notes += _kept(state, text, temporaries)
    notes += _carried(state, text)
    notes += _moved(state, compare(state, collectives_of(text, state.executed.mesh)))
    return (*notes, *_computed(state, traced, compiled, temporaries))


# -- shardings -------------------------------------------------------------------------------------------------


def _refuse_whole(state: JaxState, params: Any, moments: Any) -> None:
    """Raise if the step leaves more of a parameter or of its optimizer state on a device than the plan says."""
    for name, sharding in params.items():
        _refuse_more(state, name, name, state.params[name].shape, sharding)
    leaves = jax.tree.leaves_with_path(state.moments)
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(moments), strict=True):
        if leaf.ndim:
            _refuse_more(state, f"optimizer state {jax.tree_util.keystr(path)}", parameter_of(path), leaf.shape, sharding)


def _refuse_more(state: JaxState, what: str, name: str, shape: tuple[int, ...], sharding: Any) -> None:
    p = state.shardings.parameters.get(name)
    parts = 1
    if p is not None:
        split = math.prod(shape) // max(1, math.prod(p.gathered.shard_shape(shape)))
        is_sharded = p.unit.layout != "replicated" and not p.whole
        parts = split * (state.executed.mesh.shard if is_sharded else 1)
    elif state.executed.mesh.shard > 1:
        raise FullshardError(f"{what} is of no parameter, so it lies whole on every device; this is a bug of fullshard")
    held = math.prod(sharding.shard_shape(shape))
    if held * parts > math.prod(shape):
        raise FullshardError(
            f"{what}: the plan leaves {math.prod(shape) // parts:,} of its {math.prod(shape):,} elements on a device, but the "
            f"compiled step {held:,}; this is a bug of fullshard"
        )


# -- memory ----------------------------------------------------------------------------------------------------


def _old_state(state: JaxState, memory: Any) -> Iterator[str]:
    """A note if new parameters and optimizer state do not take the old ones' place."""
    both = state.held_bytes("device"), state.held_bytes("host")
    held = sum(found[kind] for found in both for kind in ("params", "optimizer"))
    beside = held - memory.alias_size_in_bytes - memory.host_alias_size_in_bytes
    if beside > OLD * held:
        yield f"the compiled step has {bytes_text(beside)} of the old state beside the new one, of {bytes_text(held)}"


def _needed(state: JaxState, values: TracedValues, memory: Any) -> Iterator[str]:
    """A note on more temporaries than the plan can need."""
    planned = planned_temporaries(state, values)
    most, found = sum(planned.values()), memory.temp_size_in_bytes
    if found > most + SPARE["cpu" if jax.default_backend() == "cpu" else "gpu"]:
        kinds = ", ".join(f"{kind} {bytes_text(n)}" for kind, n in planned.items())
        yield f"the compiled step needs {bytes_text(found)} besides its arguments, the plan at most {bytes_text(most)} ({kinds})"


# -- gathered parameters ---------------------------------------------------------------------------------------


def _kept(state: JaxState, text: str, temporaries: int) -> Iterator[str]:
    """A note on gathered parameters that the plan frees and the step keeps from forward to backward. Raises if they are most of
    the model, and more than the plan ever has at once."""
    freed = _freed(state)
    kept = [(unit, n) for unit, n in kept_gathers(text, state.executed.mesh) if not unit or unit in freed]
    nbytes, planned = sum(n for _, n in kept), 2 * max(freed.values(), default=0)
    if not kept or nbytes * 20 < sum(freed.values()):
        return
    said = f"{bytes_text(nbytes)} of gathered parameters from forward to backward"
    if nbytes * 2 < sum(freed.values()) or nbytes <= planned:
        units = ", ".join(dict.fromkeys(unit or "those read outside the calls of their modules" for unit, _ in kept))
        yield f"the compiled step keeps {said}, which the plan frees: {units}"
        return
    raise FullshardError(
        f"the plan frees gathered parameters and has {bytes_text(planned)} of them at once, but the compiled step keeps {said} "
        f"(temporaries: {bytes_text(temporaries)}); call the modules' own methods one after another instead of reading their "
        "weights, or write a strategy that keeps them, as zero2"
    )


def _freed(state: JaxState) -> dict[str, int]:
    """Bytes that each unit gathers and frees after its forward."""
    item, found = ITEM_BYTES[state.plan.precision.compute], dict[str, int]()
    for name, p in state.shardings.parameters.items():
        if p.unit.layout != "replicated" and p.unit.reshard is not False and not p.whole and state.executed.mesh.shard > 1:
            numel = math.prod(p.gathered.shard_shape(state.params[name].shape))
            found[p.unit.name] = found.get(p.unit.name, 0) + item * numel
    return found


def _carried(state: JaxState, text: str) -> Iterator[str]:
    """A note on whole parameters or gradients that the loop over micro-batches has in memory besides those of the plan."""
    if state.plan.batch.accumulate == 1:
        return
    shapes = {n: (alike(p.shard.shard_shape(x.shape)), alike(p.gathered.shard_shape(x.shape))) for n, p, x in _arrays(state)}
    found, in_shards = Counter(loop_values(text)), {shard for shard, _ in shapes.values()}
    wide = jax.default_backend() == "cpu" and ITEM_BYTES[state.plan.precision.compute] < 4  # XLA's on a CPU are in fp32, too
    for n, p, _ in _arrays(state):
        found[shapes[n][1]] -= (2 if wide else 1) if p.unit.layout == "optimizer" else 0
    more = [n for n, (_, whole) in shapes.items() if whole not in in_shards and found[whole] > 0]
    if more:
        others = f" and {len(more) - 1} more" if len(more) > 1 else ""
        nbytes = sum(4 * math.prod(dims) * found[dims] for dims in {shapes[n][1] for n in more})
        yield (
            f"the compiled step has {bytes_text(nbytes)} of whole parameters or gradients in memory from one micro-batch to the "
            f"next, which the plan frees or reduces: those of {more[0]}{others}"
        )


def _arrays(state: JaxState) -> list[tuple[str, ParameterSharding, jax.Array]]:
    return [(name, p, state.params[name]) for name, p in state.shardings.parameters.items()]


# -- collectives and work --------------------------------------------------------------------------------------


def _moved(state: JaxState, found: CollectiveCheck) -> Iterator[str]:
    """A note on what is moved besides the schedule's."""
    wide = 4 / ITEM_BYTES[state.plan.precision.compute] if jax.default_backend() == "cpu" else 1  # XLA's on a CPU are in fp32
    far = TRAFFIC * sum(scheduled for u in found.units for scheduled, _ in (u.gathered, u.reduced, u.copies))
    said = [
        f"{u.unit} {what} {bytes_text(compiled)}, not {bytes_text(scheduled)}"
        for u in found.units
        for (scheduled, compiled), what in ((u.gathered, "gathers"), (u.reduced, "reduces"), (u.copies, "all-reduces"))
        if compiled - scheduled > far and compiled > TIMES * max(1.0, wide) * scheduled
    ]
    if found.stray > far:
        said.append(f"{bytes_text(found.stray)} are no unit's parameters or gradients")
    if said:
        more = f", and {len(said) - 1} more, which on_jax.check_collectives shows" if len(said) > 1 else ""
        yield f"the compiled step moves more than the plan's schedule: {said[0]}{more}"


def _computed(state: JaxState, traced: Any, compiled: Any, temporaries: int) -> Iterator[str]:
    """A note on work that every device does, though the plan spreads it."""
    costs = compiled.cost_analysis()
    own = float((costs[0] if isinstance(costs, list) else costs).get("flops", 0.0))
    share = traced_flops(traced.jaxpr.jaxpr) / state.executed.mesh.devices
    if own > WORK * share:
        yield (
            f"each device computes {count_text(own)} floating-point operations in a step, not its {count_text(share)} "
            f"(temporaries: {bytes_text(temporaries)}): some layers compute all rows on every device, so check what they do to "
            "the batch's dim"
        )
