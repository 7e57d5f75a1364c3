"""A model, its optimizer and its plan on JAX: what `shard` returns and a step changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
from flax import nnx

from fullshard.base.errors import FullshardError
from fullshard.on_jax.model.scanned_layers import Stack, executed
from fullshard.on_jax.offload.memory_kinds import HostParameter, kind_of
from fullshard.on_jax.parallelize.shardings import Shardings
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import HomeName, Plan

TORN = (
    "a step failed while it ran, and the arrays of the state had gone into it: load the last checkpoint into a state of "
    "on_jax.shard"
)


@dataclass
class JaxState:
    """Parameters by name, optimizer state and other variables (running statistics, random keys), as arrays on the plan's mesh."""

    engine: ClassVar[str] = "jax"
    plan: Plan
    optimizer: Optimizer | None
    graph: Any  # of the model: all but its arrays
    paths: dict[str, tuple[Any, ...]]  # of each parameter in the graph
    shardings: Shardings
    params: dict[str, jax.Array]
    moments: Any  # the optimizer's state
    rest: Any
    moment_shardings: Any = None
    step: int = 0
    notes: tuple[str, ...] = ()
    stacks: tuple[Stack, ...] = ()  # blocks that are scanned
    compiled: dict[Any, Any] = field(default_factory=dict, repr=False)  # steps, by what they were compiled for
    checked: set[Any] = field(default_factory=set, repr=False)  # losses whose step was held against the plan

    @property
    def model(self) -> nnx.Module:
        """The model with its parameters as they are now."""
        return self.merge(self.params, self.rest)

    @property
    def executed(self) -> Plan:
        """The plan, with scanned blocks as one unit."""
        return executed(self.plan, self.stacks)

    @property
    def kernels(self) -> dict[str, str]:
        """Nothing: XLA makes the kernels of updates."""
        return {}

    @property
    def wire_errors(self) -> dict[str, float]:
        """Nothing: collectives are plain."""
        return {}

    @property
    def updates_overlap(self) -> bool:
        """False: a step ends with its updates."""
        return False

    @property
    def compiles(self) -> bool:
        """True: every first step compiles."""
        return True

    def merge(self, params: Mapping[str, jax.Array | HostParameter], rest: Any) -> nnx.Module:
        """The model with these values."""
        flat = [(self.paths[name], nnx.Param(value)) for name, value in params.items()]
        own = jax.tree.map(lambda x: x, rest)  # new variables: those of another trace cannot be changed
        return nnx.merge(self.graph, nnx.from_flat_state(flat), own)

    def held_bytes(self, home: HomeName = "device") -> dict[str, int]:
        """Bytes of this process's first device by kind: in its own memory, or its part of the host's. `variables`, if the model
        has any: what is no parameter, such as statistics of batches and random keys."""
        here = lambda tree: [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == kind_of(home)]
        found = {"params": device_bytes(here(self.params)), "optimizer": device_bytes(here(self.moments))}
        others = device_bytes(here(self.rest))
        return found | ({"variables": others} if others else {})

    def refuse_torn(self) -> None:
        """Raise if a step has failed on the devices. It had the old arrays, and the new ones are errors, which JAX raises when
        they are read. Does not wait for a step that runs."""
        array: Any = next(iter(self.params.values()))
        try:
            if not array.is_deleted():
                array.block_until_ready() if array.is_ready() else None
                return
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # which of them, its version tells
            raise FullshardError(TORN) from error
        raise FullshardError(TORN)

    def check(self) -> None:
        """Raise unless every array lies as the plan says, in the memory that it says."""
        for name, array in self.params.items():
            _refuse_other(name, array, self.shardings.parameters[name].rest)
        if self.moment_shardings is not None:
            leaves, wanted = jax.tree.leaves_with_path(self.moments), jax.tree.leaves(self.moment_shardings)
            for (path, array), sharding in zip(leaves, wanted, strict=True):
                _refuse_other(f"optimizer state {jax.tree_util.keystr(path)}", array, sharding)


def _refuse_other(name: str, array: jax.Array, wanted: jax.sharding.NamedSharding) -> None:
    if array.sharding.memory_kind != wanted.memory_kind:
        kinds = f"{array.sharding.memory_kind} memory, but the plan says {wanted.memory_kind}"
        raise FullshardError(f"{name} is in {kinds}; this is a bug of fullshard")
    if not array.sharding.is_equivalent_to(wanted, array.ndim):
        raise FullshardError(f"{name} lies as {array.sharding}, but the plan says {wanted.spec}; this is a bug of fullshard")


def device_bytes(tree: Any) -> int:
    """Bytes of this process's first device in arrays."""
    return sum(int(leaf.addressable_shards[0].data.nbytes) for leaf in jax.tree.leaves(tree))
