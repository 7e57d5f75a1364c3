"""The phases of a micro-batch in order, each unit's under its own remat choice, and the owners of the tensors in them."""

from dataclasses import replace
from functools import lru_cache

from fullshard.base.errors import FullshardError
from fullshard.model.costs import Costs, Phase, Section, Trace
from fullshard.model.description import Description
from fullshard.plan.engine_traits import TRAITS
from fullshard.plan.plan import Plan, Unit
from fullshard.planner.step.memo import remembered

PhaseSections = list[tuple[Phase, str, Section]]
BACKWARD: tuple[Phase | str, ...] = ("backward", "done", "end")
LOSS: tuple[Phase | str, ...] = ("chunk", "chunked", "loss")


def refuse_unpredicted(plan: Plan, description: Description) -> None:
    """Raise for a plan that cannot be predicted from the description's costs."""
    if description.costs is None:
        raise FullshardError("this description has no costs; describe the model with micro_batch and sequence")
    description.costs.on(plan.mesh).check(plan.batch.micro_batch, plan.batch.sequence, plan.batch.dims)
    if plan.precision.output not in (None, plan.precision.compute):
        raise FullshardError(f"precision.output = {plan.precision.output!r} cannot be predicted yet; leave it out")
    blocks = {u.name for u in description.units if u.kind == "block"}
    for unit in plan.units:
        if (unit.home.params, unit.home.optimizer) == ("disk", "device"):
            raise FullshardError(
                f"unit {unit.name}: home.params = 'disk' is not carried out with home.optimizer = 'device'; write 'disk'"
            )
        if unit.remat != "none" and unit.name not in blocks:
            raise FullshardError(f"unit {unit.name}: remat = {unit.remat!r} is predicted for blocks only; write 'none'")


def phase_sections(plan: Plan, costs: Costs, loss: str) -> PhaseSections:
    """(phase, unit, section) of a micro-batch in order, each unit's section from the trace of its own remat choice, with the
    plan's attention."""
    found = _sections(plan, costs, loss)
    return [(p, u, _with_flash(s)) for p, u, s in found] if plan.kernels.attention == "flash" else found


def remembered_sections(plan: Plan, description: Description, loss: str) -> PhaseSections:
    """The same of a description. Plans with the same choices share one list, which nobody changes."""
    assert description.costs is not None
    costs = description.costs.on(plan.mesh)
    choices = tuple((u.name, u.modules, u.remat) for u in plan.units)
    key = (plan.precision.compute, loss, plan.compile, plan.kernels.attention, choices)
    return remembered(description, "sections", costs, key, lambda: phase_sections(plan, costs, loss))


@lru_cache(maxsize=4096)
def _with_flash(section: Section) -> Section:
    """The section with the workspace of FlashAttention in place of cuDNN's, which traces have."""
    named = {"attention_backward": "flash_attention_backward"}
    return replace(section, events=tuple(replace(e, rule=named.get(e.rule, e.rule)) for e in section.events))


def _sections(plan: Plan, costs: Costs, loss: str) -> PhaseSections:
    compute = plan.precision.compute
    base = costs.trace(compute, loss, "none")
    choices = {u.name: _choice(plan, u) for u in plan.units}
    remats = {name: choice for name, choice in choices.items() if choice != "none"}
    if not remats:
        return list(base)
    if _has_inner_units(plan):
        return _one_choice(plan, costs, loss, choices)
    others: dict[str, Trace] = {r: _remat_trace(costs, compute, loss, r) for r in set(remats.values())}
    found: PhaseSections = []
    near = neighbours(list(base))
    for phase, unit, section in base:
        if unit in remats:
            section = others[remats[unit]].by_phase[phase, unit]
        before = remats.get(near[unit][0]) if unit in near else None
        if before is not None and before != remats.get(unit):
            section = _with_frees_of_previous(section, others[before].by_phase.get((phase, unit)))
        found.append((phase, unit, section))
    return _with_last_frees(found, near)


def _has_inner_units(plan: Plan) -> bool:
    """True if a unit lies inside another, as experts do inside their block."""
    return any(m.startswith(f"{o}.") for u in plan.units for m in u.modules for v in plan.units for o in v.modules if o)


def _one_choice(plan: Plan, costs: Costs, loss: str, choices: dict[str, str]) -> PhaseSections:
    """The phases where units lie inside blocks: a block under remat runs its inner unit's forward again in backward."""
    blocks = {choices[u.name] for u in plan.units if any(v.name.startswith(f"{u.name}.") for v in plan.units)}
    if len(blocks) > 1:
        raise FullshardError(
            "blocks with units inside, such as experts, are predicted with the same remat for all; set it on all or none"
        )
    return list(_remat_trace(costs, plan.precision.compute, loss, blocks.pop()))


def _with_frees_of_previous(section: Section, other: Section | None) -> Section:
    """The section with the frees of the previous unit's tensors that the trace under that unit's remat choice has here.

    Without remat autograd holds those tensors longer. A tensor that is freed twice is freed at the later place.
    """
    frees = [e for e in (other.events if other else ()) if e.action == "free" and e.unit == "<" and e not in section.events]
    return replace(section, events=(*section.events, *frees)) if frees else section


def _choice(plan: Plan, unit: Unit) -> str:
    """The name of the trace that a unit follows: its remat choice, compiled or not."""
    return f"compiled {unit.remat}" if is_compiled(plan, unit) else unit.remat


def is_compiled(plan: Plan, unit: Unit) -> bool:
    """True for blocks of a compiled plan: units of one module that are named after it."""
    return plan.compile and unit.modules == (unit.name,)


def as_compiled(plan: Plan, engine: str) -> Plan:
    """The plan whose sections an engine runs: where a step is one program, everything is compiled."""
    return replace(plan, compile=True) if TRAITS[engine].one_program else plan


def _with_last_frees(found: PhaseSections, near: dict[str, tuple[str, str]]) -> PhaseSections:
    """Keep only the last free of each tensor: a block under remat may hold it longer than the others do."""
    freed: set[tuple[str, str]] = set()
    kept: PhaseSections = []
    for phase, unit, section in reversed(found):
        twice = set()
        for i in range(len(section.events) - 1, -1, -1):
            e = section.events[i]
            if e.action == "free" and (e.unit or not e.tensor.isdigit()):
                name = (owner(e.unit, unit, near), e.tensor)
                if name in freed:
                    twice.add(i)
                freed.add(name)
        if twice:
            section = replace(section, events=tuple(e for i, e in enumerate(section.events) if i not in twice))
        kept.append((phase, unit, section))
    return kept[::-1]


def neighbours(found: PhaseSections) -> dict[str, tuple[str, str]]:
    """The names of the units before and after each unit, in the order of forward; empty at the ends."""
    order = ["", *dict.fromkeys(unit for phase, unit, _ in found if phase == "forward"), ""]
    return {unit: (order[i - 1], order[i + 1]) for i, unit in enumerate(order) if unit}


def owner(word: str, unit: str, near: dict[str, tuple[str, str]]) -> str:
    """The owner of a tensor in an event of `unit`. `word`: "" the unit, "<" and ">" its neighbours, "/" no unit, else a name."""
    if word == "":
        return unit
    if word in "<>":
        return near[unit][word == ">"]
    return "" if word == "/" else word


def _remat_trace(costs: Costs, compute: str, loss: str, remat: str) -> Trace:
    """The trace of a remat choice; with another loss if there is none with this one, since blocks do not depend on it."""
    known = [of for _, of, choice in costs.traces if choice == remat]
    return costs.trace(compute, loss if loss in known or not known else known[0], remat)
