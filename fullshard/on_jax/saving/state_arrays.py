"""The arrays of a state by name, as a checkpoint holds them. The names are those of the torch engine.

model.NAME              parameters (tied ones once) and other variables, such as statistics of batches
optimizer.NAME.KEY      the optimizer's arrays, by parameter
rng.jax.PATH            the keys and counters of random streams

Optax counts updates once for all parameters, torch once for each: a save gives every parameter a `step`, a load demands that all
are equal.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.manifest_records import TensorTypes
from fullshard.on_jax.model.describe import Factory, abstract
from fullshard.on_jax.model.module_tree import named_parameters
from fullshard.on_jax.model.scanned_layers import is_stacked, layer_names
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.tensors.dtypes import JAX_DTYPES, safetensors_name
from fullshard.on_jax.tensors.stacked_arrays import LayerSlice
from fullshard.plan.plan import Plan

HostOrDevice = np.ndarray | jax.Array | LayerSlice
RNG = "rng.jax."


@dataclass(frozen=True)
class Check:
    """What a save demands of an array: no NaN and, unless it may be, no infinity. `kind`: what it holds, for the error."""

    kind: str
    infinity: bool = False


@dataclass(frozen=True)
class OptimizerSlots:
    """The optimizer's arrays by slot, as torch calls it, and parameter. The tables are those of the Optax state itself. `count`:
    updates done, or None if the optimizer does not count them."""

    tables: Mapping[str, dict[str, Any]]
    count: jax.Array | None

    @property
    def names(self) -> list[str]:
        """The parameters that have slots; frozen ones have none."""
        return [name for name, leaf in next(iter(self.tables.values()), {}).items() if isinstance(leaf, jax.Array)]

    def items(self) -> Iterator[tuple[str, str, jax.Array]]:
        """Parameter, slot and array of each."""
        return ((name, key, table[name]) for key, table in self.tables.items() for name in self.names)


def optimizer_slots(moments: Any) -> OptimizerSlots:
    """The slots of an Optax state."""
    known = lambda node: isinstance(node, optax.ScaleByAdamState | optax.TraceState)
    for node in jax.tree.leaves(moments, is_leaf=known):
        if isinstance(node, optax.ScaleByAdamState):
            return OptimizerSlots({"exp_avg": node.mu, "exp_avg_sq": node.nu}, node.count)
        if isinstance(node, optax.TraceState):
            return OptimizerSlots({"momentum_buffer": node.trace}, None)
    return OptimizerSlots({}, None)


def state_arrays(state: JaxState) -> dict[str, HostOrDevice]:
    """All arrays of a checkpoint of this state. Before the first update there is no optimizer state, as on torch."""
    found: dict[str, HostOrDevice] = {}
    for name, value in [*weights(state), *((name, plain(variable[...])) for name, variable in variables(state.rest))]:
        found |= layers(state, name, value)
    slots = optimizer_slots(state.moments)
    if not begun(state, slots):
        return found
    for name, key, value in slots.items():
        found |= layers(state, f"optimizer.{name}.{key}", value)
    if slots.count is not None:
        number = np.asarray(slots.count.addressable_data(0), np.float32)
        found |= {f"optimizer.{name}.step": number for name in slot_names(state)}
    return found


def checks(state: JaxState) -> dict[str, Check]:
    """What a save demands of the model's arrays. A variable that no layer of NNX computes from batches may be a mask."""
    found = {name: Check("weights") for name, _ in weights(state)}
    for name, variable in variables(state.rest):
        if not name.startswith(RNG):
            found[name] = Check("statistics") if isinstance(variable, nnx.BatchStat) else Check("values", infinity=True)
    return {n: check for name, check in found.items() for n in layer_names(state.stacks, name)}


def weights(state: JaxState) -> Iterator[tuple[str, jax.Array]]:
    return ((f"model.{name}", value) for name, value in state.params.items())


def layers(state: JaxState, name: str, value: Any) -> dict[str, Any]:
    """A value by its name in a checkpoint; of scanned blocks, that of each layer."""
    if not is_stacked(name):
        return {name: value}
    return {n: LayerSlice(value, i) for i, n in enumerate(layer_names(state.stacks, name))}


def slot_names(state: JaxState) -> list[str]:
    """The parameters that have optimizer state, as a checkpoint calls them."""
    return [n for name in optimizer_slots(state.moments).names for n in layer_names(state.stacks, name)]


def begun(state: JaxState, slots: OptimizerSlots) -> bool:
    """Whether the optimizer has made an update."""
    return state.step > 0 if slots.count is None else int(slots.count.addressable_data(0)) > 0


def without_slots(state: JaxState) -> list[str]:
    """The trained parameters that have no optimizer state."""
    if state.optimizer is None:
        return []
    slots = optimizer_slots(state.moments)
    if slots.tables and begun(state, slots):
        return []
    return [n for name in slots.names or state.params for n in layer_names(state.stacks, name)]


def variables(rest: Any) -> Iterator[tuple[str, nnx.Variable[Any]]]:
    """The variables of a model that are not parameters, by their names in a checkpoint."""
    for path, variable in nnx.to_flat_state(rest):
        name = ".".join(map(str, path))
        if not isinstance(variable[...], jax.Array | jax.ShapeDtypeStruct):
            raise FullshardError(f"{name} is not an array, and nothing is pickled; make it an attribute that is not a Variable")
        random = isinstance(variable, nnx.RngState) or is_key(variable[...])
        yield f"{RNG if random else 'model.'}{name}", variable


def is_key(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


def plain(value: jax.Array) -> jax.Array:
    """A random key as the integers that it consists of; any other array itself."""
    return jax.random.key_data(value) if is_key(value) else value


# -- shapes and dtypes -----------------------------------------------------------------------------------------


def array_types(arrays: Mapping[str, HostOrDevice]) -> TensorTypes:
    return {name: (tuple(value.shape), safetensors_name(name, value.dtype)) for name, value in arrays.items()}


def expected_types(state: JaxState, without: list[str] | str) -> TensorTypes:
    """Shape and dtype of all tensors of a checkpoint of this state but random streams. `without`: parameters that have no
    optimizer state, or `all`."""
    others = ((name, variable[...]) for name, variable in variables(state.rest) if not name.startswith(RNG))
    found = {n: v for name, value in (*weights(state), *others) for n, v in layers(state, name, value).items()}
    return {**array_types(found), **_slot_types(state, without)}


def _slot_types(state: JaxState, without: list[str] | str) -> TensorTypes:
    slots = optimizer_slots(state.moments)
    names = {name for name in slot_names(state) if without != "all" and name not in without}
    found = {f"{n}.{key}": v for name, key, array in slots.items() for n, v in layers(state, name, array).items() if n in names}
    types = array_types({f"optimizer.{slot}": value for slot, value in found.items()})
    return {**types, **{f"optimizer.{name}.step": ((), "F32") for name in names if slots.count is not None}}


def weights_of(model: Factory | nnx.Module, plan: Plan) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each weight in a checkpoint of this model under this plan."""
    made = model if isinstance(model, nnx.Module) else abstract(model)
    master = np.dtype(JAX_DTYPES[plan.precision.master])
    found = {f"model.{n}": (tuple(p.shape), safetensors_name(n, master)) for n, p in named_parameters(made).items()}
    _, _, *others = nnx.split(made, nnx.Param, ...)
    rest = {n: v[...] for n, v in variables(others[0]) if not n.startswith(RNG)}
    return found | {n: (tuple(v.shape), safetensors_name(n, v.dtype)) for n, v in rest.items()}


def checkpoint_bytes(state: JaxState) -> int:
    """The size of a checkpoint of this state, without headers and manifest."""
    held = [*state.params.values(), *(array for _, _, array in optimizer_slots(state.moments).items())]
    return sum(array.nbytes for array in held)
