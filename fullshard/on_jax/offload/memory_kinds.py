"""Homes as JAX's memory kinds. What rests on the host is in `pinned_host`; the compiled step moves it to the device and back."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from fullshard.base.errors import FullshardError
from fullshard.plan.plan import HomeName, Plan, Unit

DEVICE, HOST = "device", "pinned_host"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HostParameter:
    """A parameter on the host inside a step. `zeros`: on the device, in its place differentiated, so that the gradient is
    there, too: JAX puts the gradient of an array where the array is."""

    value: jax.Array
    zeros: jax.Array

    def __getitem__(self, _: Any) -> Any:
        raise FullshardError(
            "a parameter with home.params = 'host' is read outside the calls of its unit's modules; write home.params = 'device'"
        )


def kind_of(home: HomeName) -> str:
    """The memory kind of a home."""
    return HOST if home == "host" else DEVICE


def at_home(sharding: NamedSharding, home: HomeName) -> NamedSharding:
    """The same sharding in the memory of a home."""
    return sharding.with_memory_kind(kind_of(home))


def is_on_host(x: jax.Array) -> bool:
    """True of arrays, and of those being traced, in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def refuse_homes(plan: Plan, device: jax.Device) -> None:
    """Raise if memory of this kind of device cannot be the home of a unit's bytes. Allocates nothing."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    for unit in plan.units:
        _refuse_home(unit, device.platform, kinds)


def _refuse_home(unit: Unit, platform: str, kinds: set[str]) -> None:
    for part in ("params", "optimizer", "activations"):
        if getattr(unit.home, part) == "host" and HOST not in kinds:
            raise FullshardError(
                f"unit {unit.name}: home.{part} = 'host': JAX has no {HOST} memory on {platform}; write 'device'"
            )
    if unit.home.activations == "host" and "" in unit.modules:
        raise FullshardError(
            f"unit {unit.name}: home.activations = 'host' is for units inside the model, not for the whole of it; write 'device'"
        )
