"""The numbers of one unit under a plan: what a rank holds, gathers and reduces, in elements."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fullshard.errors import FullshardError
from fullshard.model.description import ITEM_BYTES, Description, Tensor, UnitDescription
from fullshard.plan import Home, Plan, Unit


@dataclass(frozen=True)
class Group:
    """A unit's parameters on this rank, which of those on a tensor axis has its part; every tuple has an entry a parameter,
    in order.

    Parameters are cut by rows; rank 0, which is meant here, has the most.
    """

    name: str
    parameters: tuple[Tensor, ...]
    shards: tuple[int, ...]  # elements at rest
    world: int  # ranks that gather together
    copies: int  # ranks that reduce together on top of that
    reshard: bool | int
    keeps: bool  # stays whole between micro-batches
    home: Home = Home()  # noqa: RUF009  (frozen)

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """Elements when gathered, padding included."""
        return tuple(n * self.world for n in self.shards)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Which parameters get gradients."""
        return tuple(i for i, p in enumerate(self.parameters) if p.trainable)

    @property
    def moving(self) -> int:
        """Elements of this rank's trained shards."""
        return sum(self.shards[i] for i in self.trained)

    @property
    def away(self) -> bool:
        """Whether the shard that is gathered from is a copy of a master elsewhere, in the compute dtype."""
        return self.home.params != "device" or self.home.optimizer != "device"


def groups(plan: Plan, description: Description) -> dict[str, Group]:
    """Every unit of the plan, by name."""
    known = {u.name: u for u in description.units}
    local = description.costs.on(plan.mesh.tensor).shapes if plan.mesh.tensor > 1 and description.costs else {}
    found = {}
    for unit in plan.units:
        if unit.name not in known:
            raise FullshardError(f"unit {unit.name} of the plan is not in the description of {description.model}; plan again")
        found[unit.name] = _group(plan, unit, known[unit.name], local)
    return found


def _group(plan: Plan, unit: Unit, described: UnitDescription, local: dict[str, tuple[int, ...]]) -> Group:
    parameters = (
        tuple(replace(p, shape=local.get(p.name, p.shape)) for p in described.parameters) if local else described.parameters
    )
    whole = unit.layout == "replicated"
    world = 1 if whole else plan.mesh.shard
    copies = plan.mesh.data if whole else plan.mesh.replicate
    shards = tuple(-(-p.shape[0] // world) * (p.numel // p.shape[0]) for p in parameters)
    reshard = unit.reshard if unit.layout == "sharded" else False
    return Group(unit.name, parameters, shards, world, copies, reshard, unit.layout == "optimizer", unit.home)


@lru_cache
def item(dtype: str) -> int:
    return ITEM_BYTES[dtype]
