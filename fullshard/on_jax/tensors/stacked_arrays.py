"""Arrays with a dim for the layers: filled one layer at a time, and read one layer at a time."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


@dataclass(frozen=True)
class LayerSlice:
    """One layer of a stacked array, not yet copied from it."""

    array: jax.Array
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape[1:])

    @property
    def ndim(self) -> int:
        return self.array.ndim - 1

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def taken(self) -> jax.Array:
        """The layer as an array of its own."""
        return self.array[self.index]

    def parts(self) -> dict[tuple[int, ...], "LayerSlice"]:
        """The parts that this process's devices hold, each once, by where they begin."""
        at = lambda index: tuple(s.indices(size)[0] for s, size in zip(index[1:], self.shape, strict=True))
        return {at(shard.index): LayerSlice(shard.data, self.index) for shard in reversed(self.array.addressable_shards)}


def stacked_sharding(sharding: NamedSharding) -> NamedSharding:
    """Of the stacked array of layers that lie so. The dim of layers is never sharded."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec), memory_kind=sharding.memory_kind)


def layer_sharding(sharding: NamedSharding) -> NamedSharding:
    """Of one layer of an array that lies so."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]), memory_kind=sharding.memory_kind)


def stacked_array(layers: Iterable[jax.Array], count: int, sharding: NamedSharding) -> jax.Array:
    """The array of all layers. At most one layer is held besides."""
    found: jax.Array | None = None
    for index, layer in enumerate(layers):
        if found is None:
            found = jax.jit(functools.partial(jnp.zeros, (count, *layer.shape), layer.dtype), out_shardings=sharding)()
        found = jax.block_until_ready(_setter(sharding)(found, layer, index))
    assert found is not None
    return found


@functools.cache
def _setter(sharding: NamedSharding) -> Callable[..., jax.Array]:
    set_layer = lambda whole, layer, index: jax.lax.dynamic_update_index_in_dim(whole, layer, index, 0)
    return jax.jit(set_layer, donate_argnums=0, out_shardings=sharding)
