"""The units whose activations leave the device, read from a plan; and plans that are refused."""

from torch import nn

from fullshard.base.errors import FullshardError
from fullshard.plan.plan import Plan, Unit
from fullshard.planner.step import saved_activations


def refuse_activations(model: nn.Module, plan: Plan) -> None:
    """Raise a `FullshardError` if activations cannot leave the device as the plan says, or if that would have no effect."""
    learning = False
    for unit in plan.units:
        modules = [model.get_submodule(path) for path in unit.modules]
        learning = learning or any(p.requires_grad for m in modules for p in m.parameters())
        if unit.home.activations != "device" and (why := _objection(unit, plan, modules, learning)):
            raise FullshardError(f"unit {unit.name}: home.activations = {unit.home.activations!r} {why}")
    chosen = [u for u in plan.units if u.home.activations != "device"]
    if chosen and not leads(plan):
        first = chosen[0]
        raise FullshardError(
            f"unit {first.name}: home.activations = {first.home.activations!r} has no effect: what the last unit saves is wanted "
            "back at once; choose units before it, or write 'device'"
        )


def _objection(unit: Unit, plan: Plan, modules: list[nn.Module], learning: bool) -> str:
    """The reason against it, or an empty string."""
    inside = [u.name for u in plan.units if u is not unit and _around(unit, u)]
    recomputed = [u.name for u in plan.units if u is not unit and _around(u, unit) and u.remat != "none"]
    if inside:
        return f"cannot be carried out around another unit ({inside[0]}); set it on the units inside"
    if recomputed:
        return f"has no effect: unit {recomputed[0]} around it recomputes it; write 'device'"
    if not learning:
        return "has no effect: nothing in this unit or before it is trained, so nothing is saved; write 'device'"
    if all(isinstance(m, nn.Embedding) for m in modules):
        return "has no effect: an embedding saves nothing but token ids; write 'device'"
    return ""


def _around(outer: Unit, inner: Unit) -> bool:
    return any(not o or i.startswith(f"{o}.") for o in outer.modules for i in inner.modules)


def row(plan: Plan) -> list[Unit]:
    """The units that run one after the other, without those that contain others."""
    return [u for u in plan.units if not any(v is not u and _around(u, v) for v in plan.units)]


def leads(plan: Plan) -> dict[str, int]:
    """The units whose activations leave the device, and over how many units each may spread its copies."""
    return saved_activations.leads(plan, [unit.name for unit in row(plan)])
