"""Loads a checkpoint of any plan, of either engine, into a sharded state. Every process reads the parts of its own devices.

The state changes only after the checkpoint's tensors match the state's and, unless the caller can fill it again, after every
byte is verified.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fullshard.base.errors import FullshardError
from fullshard.base.text import first_of
from fullshard.checkpoint.directories import Place
from fullshard.checkpoint.manifest import Manifest, TensorRecord
from fullshard.checkpoint.reader import Checkpoint, refuse_mismatch
from fullshard.checkpoint.restoring import restorable, restore
from fullshard.checkpoint.verified_load import Verify
from fullshard.on_jax.model.scanned_layers import is_stacked, layer_names
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.ranks.processes import own_agreement
from fullshard.on_jax.saving.state_arrays import (
    RNG,
    array_types,
    expected_types,
    is_key,
    layers,
    optimizer_slots,
    plain,
    slot_names,
    variables,
)
from fullshard.on_jax.tensors.dtypes import FILE_DTYPES
from fullshard.on_jax.tensors.read_boxes import read_boxes
from fullshard.on_jax.tensors.stacked_arrays import layer_sharding, stacked_array


def load_checkpoint(
    where: str | Path | Place, state: JaxState, *, allow_missing: Sequence[str] = (), verify: Verify = "first"
) -> Manifest:
    """Fill the state in place from a checkpoint of any plan; return its manifest. Collective. `verify`: see `fill_from`."""
    return restore(where, own_agreement("load"), lambda found: _fill(found, state, allow_missing), verify)


def _fill(checkpoint: Checkpoint, state: JaxState, allow_missing: Sequence[str]) -> None:
    manifest, saved = checkpoint.manifest, checkpoint.manifest.state
    tensors = restorable(manifest, optimizer=state.optimizer is not None)
    expected = expected_types(state, saved.get("without_slots", []))
    refuse_mismatch(str(checkpoint.place), tensors, expected, allow_missing)
    count = _count(Checkpoint(checkpoint.place, manifest), state, tensors)  # out of the files' order
    for name, old in sorted(state.params.items()):  # in the files' order
        state.params[name] = _read_layers(checkpoint, state, f"model.{name}", old, tensors, keep=True)
    _fill_slots(checkpoint, state, tensors, count)
    _fill_variables(checkpoint, state)
    state.step = manifest.step
    state.check()


# -- the optimizer ---------------------------------------------------------------------------------------------


def _count(checkpoint: Checkpoint, state: JaxState, tensors: dict[str, TensorRecord]) -> int:
    """The number of updates that the optimizer has made, by the checkpoint."""
    slots = optimizer_slots(state.moments)
    if slots.count is None:
        return 0
    names = slot_names(state)
    steps = {n: float(checkpoint.tensor(f"optimizer.{n}.step")) for n in names if f"optimizer.{n}.step" in tensors}
    if len(set(steps.values())) > 1:
        (first, most), (other, fewest) = max(steps.items(), key=lambda s: s[1]), min(steps.items(), key=lambda s: s[1])
        raise FullshardError(
            f"{checkpoint.place}: {first} had {most:g} updates and {other} {fewest:g}, but Optax counts them once for all "
            "parameters; resume on the torch engine"
        )
    if fresh := [n for n in names if n not in steps] if steps else []:
        warnings.warn(
            f"{checkpoint.place} has no optimizer state for {first_of(fresh)}: it starts from zero, and its updates are counted "
            f"with those of the others, of which there were {next(iter(steps.values())):g}",
            stacklevel=5,
        )
    return int(next(iter(steps.values()), 0))


def _fill_slots(checkpoint: Checkpoint, state: JaxState, tensors: dict[str, TensorRecord], count: int) -> None:
    slots = optimizer_slots(state.moments)
    for name in sorted(slots.names):
        for key, table in sorted(slots.tables.items()):  # one at a time, so that memory is needed for one new array at a time
            table[name] = _read_layers(checkpoint, state, f"optimizer.{name}.{key}", table[name], tensors, keep=False)
    if (old := slots.count) is not None:
        state.moments = jax.tree.map(lambda leaf: _filled(leaf, count) if leaf is old else leaf, state.moments)


def _read_layers(
    checkpoint: Checkpoint, state: JaxState, name: str, old: jax.Array, tensors: Mapping[str, Any], *, keep: bool
) -> jax.Array:
    """An array of the state by its name in a checkpoint; one of scanned blocks layer by layer. What the checkpoint lacks stays
    as it is with `keep`, and is 0 otherwise."""
    sharding: Any = old.sharding

    def read(full: str, sharding: Any, kept: Callable[[], jax.Array]) -> jax.Array:
        return read_array(checkpoint, full, sharding) if full in tensors else kept() if keep else _filled(kept(), 0)

    if not is_stacked(name):
        return read(name, sharding, lambda: old)
    names, own = layer_names(state.stacks, name), layer_sharding(sharding)
    kept = lambda index: jax.device_put(old[index], own)
    return stacked_array((read(n, own, functools.partial(kept, i)) for i, n in enumerate(names)), len(names), sharding)


def _filled(like: jax.Array, number: int) -> jax.Array:
    """An array of one number that lies as another one does."""
    make = lambda index: np.full([len(range(*s.indices(n))) for s, n in zip(index, like.shape, strict=True)], number, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, make)


# -- other variables -------------------------------------------------------------------------------------------


def _fill_variables(checkpoint: Checkpoint, state: JaxState) -> None:
    """Restore what is neither parameter nor optimizer state. If the checkpoint has other random streams, as one of torch has,
    they start anew from the state's own keys and the step."""
    found, saved = dict(variables(state.rest)), checkpoint.manifest.tensors
    streams = array_types(
        {
            n: value
            for name, variable in found.items()
            if name.startswith(RNG)
            for n, value in layers(state, name, plain(variable[...])).items()
        }
    )
    known = streams == {name: (record.shape, record.dtype) for name, record in saved.items() if name.startswith(RNG)}
    changed: dict[int, jax.Array] = {}  # by the id of the array that it replaces
    for name, variable in found.items():
        old = variable[...]
        if name.startswith(RNG) and not known:
            changed[id(old)] = _reseeded(old, checkpoint.manifest.step)
        elif layer_names(state.stacks, name)[0] in saved:
            changed[id(old)] = _restored(checkpoint, state, name, old)
    state.rest = jax.tree.map(lambda leaf: changed.get(id(leaf), leaf), state.rest)


def _restored(checkpoint: Checkpoint, state: JaxState, name: str, old: jax.Array) -> jax.Array:
    new = _read_layers(checkpoint, state, name, plain(old), checkpoint.manifest.tensors, keep=True)
    return jax.device_put(jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)), old.sharding) if is_key(old) else new


def _reseeded(old: jax.Array, step: int) -> jax.Array:
    """A key that depends on the step, or a counter of 0."""
    if not is_key(old):
        return _filled(old, 0)
    fold = jax.vmap(jax.random.fold_in, (0, None)) if old.ndim else jax.random.fold_in
    return jax.device_put(fold(old, step), old.sharding)


def read_array(checkpoint: Checkpoint, name: str, sharding: jax.sharding.Sharding) -> jax.Array:
    """A tensor of a checkpoint as an array."""
    record = checkpoint.manifest.tensors[name]
    return read_boxes(record.shape, sharding, FILE_DTYPES[record.dtype], lambda box, memory: checkpoint.read(name, box, memory))
