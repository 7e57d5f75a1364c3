"""Sizes of a unit under a plan: the elements that a rank holds, gathers and reduces."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fullshard.base.errors import FullshardError
from fullshard.model.description import ITEM_BYTES, Description, Tensor, UnitDescription
from fullshard.model.float8_weights import gathered_in_float8
from fullshard.plan.plan import Home, Plan, Precision, Unit
from fullshard.planner.step.memo import remembered


@dataclass(frozen=True)
class UnitSizes:
    """The parameters of a unit on rank 0, in elements. Every tuple has an entry for each parameter, in order.

    Parameters are cut by rows, and rank 0 has the most of them. With a tensor axis, and for spread experts, the sizes are those
    of one rank's part.
    """

    name: str
    parameters: tuple[Tensor, ...]
    shards: tuple[int, ...]  # elements at rest
    world: int  # ranks that gather together
    copies: int  # ranks that hold the same shard and all-reduce its gradient
    reshard: bool | int
    keeps: bool  # parameters stay gathered from one micro-batch to the next
    home: Home = Home()  # noqa: RUF009  (frozen)
    stride: int = 1  # between ranks that gather together, in ranks of the shard axis
    float8: tuple[int, ...] = ()  # indices of the parameters that are gathered in float8

    @cached_property
    def gathered(self) -> tuple[int, ...]:
        """Elements when gathered, padding included."""
        return tuple(n * self.world for n in self.shards)

    def gathered_bytes(self, item: int) -> tuple[int, ...]:
        """Bytes of each parameter when gathered. `item`: of an element of the compute dtype."""
        if item not in self._gathered_bytes:
            self._gathered_bytes[item] = tuple(n * (1 if i in self.float8 else item) for i, n in enumerate(self.gathered))
        return self._gathered_bytes[item]

    @cached_property
    def _gathered_bytes(self) -> dict[int, tuple[int, ...]]:
        return {}

    def shard_bytes(self, item: int) -> int:
        """Bytes of this rank's shards as they are gathered."""
        return sum(self.gathered_bytes(item)) // self.world

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Indices of the parameters that get gradients."""
        return tuple(i for i, p in enumerate(self.parameters) if p.trainable)

    @cached_property
    def trained_shards(self) -> tuple[int, ...]:
        """Elements at rest of the trained parameters."""
        return tuple(self.shards[i] for i in self.trained)

    @cached_property
    def held(self) -> int:
        """Elements of this rank's shards."""
        return sum(self.shards)

    @cached_property
    def moving(self) -> int:
        """Elements of this rank's shards of trained parameters."""
        return sum(self.trained_shards)

    def moment_bytes(self, precision: Precision) -> int:
        """Bytes of one moment of the trained parameters, on the device."""
        return sum(map(precision.moment_bytes, self.trained_shards))

    @cached_property
    def gradient_elements(self) -> int:
        """Elements of the trained parameters' gradients before they are reduced."""
        return sum(self.gathered[i] for i in self.trained)

    @cached_property
    def away(self) -> bool:
        """True if parameters or state rest off the device; the shard is then in the compute dtype, apart from its master."""
        return self.home.params != "device" or self.home.optimizer != "device"

    @cached_property
    def takes_gradients(self) -> bool:
        """True if the shard is the whole and nobody else has it: gradients are not reduced."""
        return self.world == self.copies == 1 and not self.away


def unit_sizes(plan: Plan, description: Description) -> dict[str, UnitSizes]:
    """The sizes of every unit of the plan, by name."""
    return remembered(description, "unit sizes", plan, (), lambda: _unit_sizes(plan, description))


def _unit_sizes(plan: Plan, description: Description) -> dict[str, UnitSizes]:
    mesh, memo = plan.mesh, description.memo.setdefault("sizes", {})
    of_plan = (mesh.replicate, mesh.shard, mesh.tensor, mesh.expert, plan.precision.float8)
    found = {}
    for unit in plan.units:
        home = unit.home
        key = (unit.name, unit.modules, unit.layout, unit.reshard, home.params, home.optimizer, home.activations, of_plan)
        if (sizes := memo.get(key)) is None:
            sizes = memo[key] = _unit(plan, unit, _described(unit, description), _local_shapes(plan, description))
        found[unit.name] = sizes
    return found


def _described(unit: Unit, description: Description) -> UnitDescription:
    for described in description.units:
        if described.name == unit.name:
            return described
    raise FullshardError(f"unit {unit.name} of the plan is not in the description of {description.model}; plan again")


def _local_shapes(plan: Plan, description: Description) -> dict[str, tuple[int, ...]]:
    return description.costs.on(plan.mesh).shapes if plan.mesh.tensor > 1 and description.costs else {}


def _unit(plan: Plan, unit: Unit, described: UnitDescription, local: dict[str, tuple[int, ...]]) -> UnitSizes:
    parameters = (
        tuple(replace(p, shape=local.get(p.name, p.shape)) for p in described.parameters) if local else described.parameters
    )
    replicated = unit.layout == "replicated"
    stride = plan.mesh.expert if unit.layout == "experts" else 1
    parameters = tuple(replace(p, shape=(p.shape[0] // stride, *p.shape[1:])) for p in parameters) if stride > 1 else parameters
    world = 1 if replicated else plan.mesh.shard // stride
    copies = plan.mesh.data if replicated else plan.mesh.replicate
    shards = tuple(-(-(p.shape or (1,))[0] // world) * math.prod(p.shape[1:]) for p in parameters)  # a scalar is one row
    reshard = unit.reshard if unit.layout in ("sharded", "experts") else False
    keeps, float8 = unit.layout == "optimizer", tuple(i for i, p in enumerate(parameters) if gathered_in_float8(plan, unit, p))
    return UnitSizes(unit.name, parameters, shards, world, copies, reshard, keeps, unit.home, stride, float8)


@lru_cache
def item(dtype: str) -> int:
    """Bytes of an element."""
    return ITEM_BYTES[dtype]


@lru_cache(maxsize=4096)
def scaled(elements: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Bytes of tensors of so many elements, of `item` bytes each."""
    return tuple(n * item for n in elements)
