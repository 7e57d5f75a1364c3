"""Named strategies: functions that make plans.

Each takes a description and returns a complete `Plan`; `Plan.change` then alters single units. Besides its own arguments
every strategy accepts precision, batch, prefetch, wire, kernels, remat, compile, tensor, split, expert, home, staging,
cpu_share and backlog.
"""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from fullshard.base.errors import checked_call, nearest
from fullshard.model.description import FLOATS, Description, UnitDescription
from fullshard.plan.choice import PlanError, choices_of
from fullshard.plan.choice_table import Spell
from fullshard.plan.plan import Batch, Home, Layout, Mesh, Plan, Precision, Remat, Unit
from fullshard.plan.unit_choices import StrategyChoices

Choice = tuple[Layout, bool | int]  # layout, reshard
OF_PLAN = tuple(f.name for f in fields(Plan) if f.name not in ("mesh", "units", "batch"))  # which a strategy hands on
COMMON = ("tensor", "expert", "batch", "remat", "remat_every", "home", *OF_PLAN)  # arguments of every strategy


@checked_call("ddp(on_torch.describe(model), devices=8)", description=Description)
def ddp(description: Description, devices: int, **common: Any) -> Plan:
    """Everything whole on every rank, gradients all-reduced (FSDP1: NO_SHARD)."""
    tensor = common.get("tensor", 1)
    return _plan(description, Mesh(replicate=_data(devices, tensor), tensor=tensor), lambda u: ("replicated", False), **common)


@checked_call("zero1(on_torch.describe(model), devices=8)", description=Description)
def zero1(description: Description, devices: int, **common: Any) -> Plan:
    """Optimizer state sharded; parameters and gradients whole for the length of a step."""
    return _plan(description, _flat(devices, common), lambda u: ("optimizer", False), **common)


@checked_call("zero2(on_torch.describe(model), devices=8)", description=Description)
def zero2(description: Description, devices: int, **common: Any) -> Plan:
    """Gradients and optimizer state sharded; gathered parameters kept until backward (SHARD_GRAD_OP)."""
    return _plan(description, _flat(devices, common), lambda u: ("sharded", False), **common)


@checked_call("zero3(on_torch.describe(model), devices=8)", description=Description)
def zero3(description: Description, devices: int, **common: Any) -> Plan:
    """Everything sharded, parameters gathered for forward and again for backward (FULL_SHARD)."""
    return _plan(description, _flat(devices, common), lambda u: ("sharded", True), **common)


@checked_call("hybrid(on_torch.describe(model), replicate=2, shard=8)", description=Description)
def hybrid(description: Description, replicate: int, shard: int, **common: Any) -> Plan:
    """Sharded over `shard` ranks (a node), replicated `replicate` times (HYBRID_SHARD, HSDP)."""
    return _plan(description, Mesh(replicate, shard, common.get("tensor", 1)), lambda u: ("sharded", True), **common)


@checked_call("hpz(on_torch.describe(model), devices=8, reshard=2)", description=Description)
def hpz(description: Description, devices: int, reshard: int, **common: Any) -> Plan:
    """zero3 that keeps parameters on `reshard` ranks after forward, so that backward gathers only
    among those (ZeRO++ hpZ)."""
    return _plan(description, _flat(devices, common), lambda u: ("sharded", reshard), **common)


@checked_call('mixed(on_torch.describe(model), devices=8, replicate=["embed"])', description=Description)
def mixed(
    description: Description, devices: int, *, replicate_below: int = 0, replicate: Sequence[str] = (), **common: Any
) -> Plan:
    """zero3 with units left whole: those with fewer than `replicate_below` parameters, and those whose
    names match a pattern of `replicate` (`["embed"]` leaves the embedding unsharded)."""
    replicate = [replicate] if isinstance(replicate, str) else replicate
    _refuse_idle(description, replicate_below, replicate)

    def choose(unit: UnitDescription) -> Choice:
        named = any(fnmatch.fnmatchcase(unit.name, p) for p in replicate)
        return ("replicated", False) if named or unit.numel < replicate_below else ("sharded", True)

    return _plan(description, _flat(devices, common), choose, **common)


STRATEGIES: dict[str, Callable[..., Plan]] = {
    "ddp": ddp,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "hybrid": hybrid,
    "hpz": hpz,
    "mixed": mixed,
}


@checked_call('strategy("zero3", on_torch.describe(model), devices=8)', name=str, description=Description)
def strategy(name: str, description: Description, **arguments: Any) -> Plan:
    """The plan of the strategy called `name`."""
    if name not in STRATEGIES:
        raise PlanError(f"unknown strategy {name!r}; known are {', '.join(STRATEGIES)}{nearest(name, list(STRATEGIES))}")
    return STRATEGIES[name](description, **arguments)


def _spell(field: str, *value: object) -> str:
    return f"{field} = {value[0]!r}" if value else field


OF_ONE = tuple(row for row in choices_of(StrategyChoices) if row.needs and row.needs[0] == "strategy")  # of one strategy


def choose(name: str, description: Description, *, devices: int, spell: Spell = _spell, **choices: Any) -> Plan:
    """The plan of the strategy called `name`, given the choices of all strategies. Raise for one that it does not take.

    `spell`: how messages write a field: `--replicate 2`, `plan.replicate = 2`.
    """
    given = {row.name: value for row in OF_ONE if (value := choices.pop(row.name, None)) not in (None, row.default, [])}
    for row in OF_ONE:
        if row.name in given and row.needs and name not in row.needs[1]:
            write = f"write {spell('strategy', row.needs[1][0])}, or leave it out"
            raise PlanError(f"{spell(row.name)} has no effect with {spell('strategy', name)}; {write}")
    own: dict[str, Any] = {"devices": devices}
    if name == "hybrid":
        own = _hybrid_axes(devices, choices.get("tensor", 1), given.get("replicate", 1), spell)
    elif name == "hpz":
        if "reshard" not in given:
            wanted = f"{spell('reshard')}, the number of ranks that keep the parameters after forward"
            raise PlanError(f"{spell('strategy', name)} needs {wanted}")
        own["reshard"] = given["reshard"]
    elif name == "mixed":
        own |= {"replicate_below": given.get("replicate_below", 0), "replicate": given.get("keep_whole", ())}
    return strategy(name, description, **own, **choices)


def _hybrid_axes(devices: int, tensor: int, replicate: int, spell: Spell) -> dict[str, int]:
    if replicate == 1:
        wanted = f"{spell('replicate')}, the number of copies of the sharded model"
        raise PlanError(f"{spell('strategy', 'hybrid')} needs {wanted}; without copies write zero3")
    if replicate < 1 or tensor < 1 or devices % (replicate * tensor):
        factors = f"{spell('replicate', replicate)} × {spell('tensor', tensor)}"
        raise PlanError(f"{factors} must divide the {devices} devices")
    return {"replicate": replicate, "shard": devices // replicate // tensor}


def _plan(
    description: Description,
    mesh: Mesh,
    choose: Callable[[UnitDescription], Choice],
    **common: Any,
) -> Plan:
    """A plan from the arguments that every strategy accepts.

    `remat` is for blocks, for every `remat_every`-th of them. `home` is for all units, its activations for blocks alone.
    """
    for key in common:
        if key not in COMMON:
            raise PlanError(f"a strategy has no argument {key!r} (common ones: {', '.join(COMMON)}){nearest(key, [*COMMON])}")
    remats = _remats(description, common.get("remat", "none"), common.get("remat_every", 1))
    home = common.get("home", Home())
    outside = _outside_blocks(description, home)
    units = []
    mesh = replace(mesh, expert=common.get("expert", 1))
    for unit in description.units:
        layout, reshard = _of_kind(unit, mesh, *choose(unit))
        its = home if unit.kind == "block" else outside
        units.append(Unit(unit.name, unit.modules, layout, reshard, remats.get(unit.name, "none"), its))
    made = Plan(
        mesh=mesh,
        units=tuple(units),
        batch=_batch(description, common.get("batch")),
        **{name: common[name] for name in OF_PLAN if name in common},
    )
    _refuse_idle_buffers(description, made.precision)
    return made


def _of_kind(unit: UnitDescription, mesh: Mesh, layout: Layout, reshard: bool | int) -> Choice:
    """The choice for a unit: small tensors stay whole, and experts are spread where the mesh has an axis for them."""
    if unit.kind == "small":
        return "replicated", False
    if unit.kind != "experts" or mesh.expert == 1:
        return layout, reshard
    if layout != "sharded":
        raise PlanError(
            f"expert = {mesh.expert} spreads sharded experts, and this strategy keeps {unit.name} {layout}; write zero3"
        )
    return "experts", reshard if mesh.shard > mesh.expert else False


def _batch(description: Description, given: Batch | None) -> Batch:
    """The given batch; without one, that of the description's example, or the default one."""
    example = description.costs.example if description.costs else None
    if example is None:
        return Batch() if given is None else given
    if isinstance(given, Batch) and given.dims != example.dims:
        raise PlanError(
            f"{description.model} was described for rows of {example.dims}; "
            f"write batch=description.batch({given.micro_batch}), or leave batch out"
        )
    return description.batch() if given is None else given


def _outside_blocks(description: Description, home: Home) -> Home:
    """The home of units that are no blocks: their activations are small or needed at once, so they stay on the device."""
    if not isinstance(home, Home):
        raise PlanError(f"home must be a Home, not {home!r}")
    if home.activations != "device" and not any(u.kind == "block" for u in description.units):
        raise PlanError(f"home.activations = {home.activations!r} has no effect: no repeated blocks were found")
    return replace(home, activations="device")


def _remats(description: Description, remat: Remat, every: int) -> dict[str, Remat]:
    if every < 1:
        raise PlanError(f"remat_every must be a positive integer, not {every!r}")
    if every > 1 and remat == "none":
        raise PlanError("remat_every has no effect with remat = 'none'; write remat = 'full' or 'selective'")
    blocks = [u.name for u in description.units if u.kind == "block"]
    if remat != "none" and not blocks:
        raise PlanError(f"remat = {remat!r} has no effect: no repeated blocks were found; group the model by class first")
    return {name: remat for i, name in enumerate(blocks) if i % every == 0}


def _refuse_idle_buffers(description: Description, precision: Precision) -> None:
    buffers = [*description.buffers, *(b for u in description.units for b in u.buffers)]
    if precision.buffers is not None and not any(b.dtype in FLOATS for b in buffers):
        raise PlanError(
            f"precision.buffers = {precision.buffers!r} has no effect: this model has no floating-point buffers; leave it out"
        )


def _flat(devices: int, common: dict[str, Any]) -> Mesh:
    tensor = common.get("tensor", 1)
    return Mesh(shard=_data(devices, tensor), tensor=tensor)


def _data(devices: int, tensor: int) -> int:
    if not isinstance(devices, int) or devices < 1:
        raise PlanError(f"devices must be a positive integer, not {devices!r}")
    if not isinstance(tensor, int) or tensor < 1 or devices % tensor:
        raise PlanError(f"tensor = {tensor!r} must divide devices = {devices}")
    return devices // tensor


def _refuse_idle(description: Description, below: int, patterns: Sequence[str]) -> None:
    names = [u.name for u in description.units]
    if not below and not patterns:
        raise PlanError("mixed needs replicate_below (a parameter count) or replicate (unit names); without either write zero3")
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise PlanError(f"mixed: no unit matches {pattern!r}; the units are {', '.join(names)}")
    named = [n for p in patterns for n in fnmatch.filter(names, p)]
    if all(u.numel < below or u.name in named for u in description.units):
        raise PlanError("mixed: no unit is left to shard; write ddp, or keep fewer units whole")
    if below and all(u.numel >= below for u in description.units):
        smallest = min(u.numel for u in description.units)
        raise PlanError(f"mixed: replicate_below = {below} leaves every unit sharded; the smallest has {smallest} parameters")
