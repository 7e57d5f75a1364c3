"""The private parts of JAX that the engine uses, each detected by name."""

from typing import Any


def coordination_client() -> Any:
    """The client of `jax.distributed`'s key-value store, or None in a process that joined no others."""
    from jax._src import distributed

    return getattr(distributed.global_state, "client", None)


def devices_are_taken() -> bool:
    """Whether this process has begun to use its devices: a GPU's memory is then largely taken."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
