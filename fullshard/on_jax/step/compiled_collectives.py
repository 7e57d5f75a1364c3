"""The collectives of a compiled step against those of the plan's schedule, unit by unit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fullshard.base.text import bytes_text, table
from fullshard.model.costs import Costs, Phase, Section, Trace
from fullshard.model.description import ITEM_BYTES, Description, Tensor, UnitDescription
from fullshard.on_jax.communication.hlo_collectives import CompiledCollective
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.plan.plan import Home, Plan, Unit
from fullshard.planner.step.schedule import schedule

WHOLE = " (whole)"  # after a unit's name: its parameters that no dim of theirs can be sharded by
Bytes = tuple[int, int]  # scheduled, compiled


@dataclass(frozen=True)
class UnitTraffic:
    """Bytes that a unit's collectives work on in a step, as scheduled and as compiled: of whole tensors for gathers and
    reductions to shards, of one device's part for all-reduces between copies."""

    unit: str
    gathered: Bytes
    reduced: Bytes
    copies: Bytes


@dataclass(frozen=True)
class CollectiveCheck:
    """The traffic of every unit. `counts`: how often the program runs each kind of collective in a step. `notes`: what JAX does
    otherwise than the schedule, and why. `differences`: what should not be. `stray`: bytes that are no unit's."""

    units: tuple[UnitTraffic, ...]
    counts: dict[str, int]
    notes: tuple[str, ...]
    differences: tuple[str, ...]
    stray: int = 0

    def __str__(self) -> str:
        cells = lambda pair: [bytes_text(n) for n in pair]
        rows = [[u.unit, *cells(u.gathered), *cells(u.reduced), *cells(u.copies)] for u in self.units]
        header = ["unit", "gathers", "compiled", "reductions", "compiled", "between copies", "compiled"]
        kinds = ", ".join(f"{kind.replace('_', '-')} {n}×" for kind, n in sorted(self.counts.items()))
        verdict = self.differences or ("the compiled step moves what the schedule says",)
        return "\n".join(
            [table(header, rows, right=range(1, 7)), f"collectives of a step: {kinds or 'none'}", *self.notes, *verdict]
        )


def compare(state: JaxState, found: Sequence[CompiledCollective]) -> CollectiveCheck:
    """The collectives of a compiled step beside those of the schedule."""
    plan, scheduled = state.executed, _scheduled(state)
    units = [_traffic(plan, unit, scheduled[unit.name], found) for unit in plan.units]
    notes: list[str] = []
    differences: list[str] = []
    for unit, traffic in zip(plan.units, units, strict=True):
        for is_known, sentence in _deviations(plan, unit, traffic):
            (notes if is_known else differences).append(sentence)
    notes += _program_notes(state, found)
    stray = sum(c.step_bytes for c in found if not c.unit and not c.number and "tensor" not in c.axes)
    stray += sum(c.step_bytes for c in found if c.kind == "other" and "tensor" not in c.axes)
    if stray:
        differences.append(f"{bytes_text(stray)} are moved that are no unit's parameters or gradients")
    operations = {(c.operation, c.kind): c.times for c in found}
    counts: dict[str, int] = {}
    for (_, kind), times in operations.items():
        counts[kind] = counts.get(kind, 0) + times
    return CollectiveCheck(tuple(units), counts, tuple(dict.fromkeys(notes)), tuple(differences), stray)


# -- what the schedule says ------------------------------------------------------------------------------------


def _scheduled_model(state: JaxState) -> tuple[Plan, Description]:
    """The state's plan and model for the schedule, which shards by rows: the sharded dim comes first. Parameters that stay whole
    are a replicated unit of their own. Where bytes rest does not matter here."""
    units: list[Unit] = []
    described: list[UnitDescription] = []
    for unit in state.executed.units:
        own = {name: p for name, p in state.shardings.parameters.items() if p.unit == unit}
        parts = {unit.name: [n for n, p in own.items() if not p.whole], unit.name + WHOLE: [n for n, p in own.items() if p.whole]}
        for name, names in parts.items():
            if names:
                units.append(_unit_in_schedule(unit, name))
                tensors = tuple(Tensor(n, _rows_first(state, n)) for n in names)
                described.append(UnitDescription(name, "block", units[-1].modules, tensors))
    batch, precision = replace(state.executed.batch, dims=""), replace(state.executed.precision, output=None)
    plan = replace(state.executed, units=tuple(units), batch=batch, precision=precision, compile=False)
    return plan, Description("model", tuple(described), costs=_order(plan, described))


def _unit_in_schedule(unit: Unit, name: str) -> Unit:
    if name.endswith(WHOLE):
        return Unit(name, (name,), layout="replicated", reshard=False)
    return replace(unit, home=Home(), remat="none")


def _rows_first(state: JaxState, name: str) -> tuple[int, ...]:
    """The shape of one tensor rank's part, its sharded dim first."""
    p = state.shardings.parameters[name]
    shape = p.gathered.shard_shape(state.params[name].shape)
    mine = p.shard.shard_shape(state.params[name].shape)
    dim = next((i for i, (a, b) in enumerate(zip(shape, mine, strict=True)) if a != b), 0)
    return (shape[dim], *shape[:dim], *shape[dim + 1 :]) if shape else (1,)


def _order(plan: Plan, units: list[UnitDescription]) -> Costs:
    """Costs that say only in which order units compute."""
    names = [u.name for u in units]
    phases: list[tuple[Phase, str]] = [(phase, n) for n in names for phase in ("forward", "leave")]
    phases += [("loss", ""), *[(phase, n) for n in reversed(names) for phase in ("backward", "done")], ("end", "")]  # type: ignore[list-item]
    trace = Trace(tuple(phases), (Section(),), (0,) * len(phases))
    compute = "bf16" if plan.precision.compute == "fp16" else plan.precision.compute
    costs = Costs({(compute, "plain", remat): trace for remat in ("none", "compiled none")})
    return replace(costs, split={plan.mesh.tensor: costs})


def _scheduled(state: JaxState) -> dict[str, dict[str, int]]:
    """Bytes of a step by unit and kind of operation. What stays whole is reduced with the rest of its unit."""
    plan, description = _scheduled_model(state)
    found = {u.name: dict.fromkeys(("gather", "reduce", "all_reduce"), 0) for u in state.executed.units}
    for op in schedule(plan, description, loss="plain", engine="jax"):
        own = found.get(op.unit.removesuffix(WHOLE), {})
        if op.kind not in own or op.ranks == 1:
            continue
        if op.unit.endswith(WHOLE):
            own["reduce"] += op.nbytes
            own["all_reduce"] += op.nbytes // plan.mesh.shard if plan.mesh.replicate > 1 else 0
        else:
            own[op.kind] += op.nbytes
    return found


# -- what was compiled -----------------------------------------------------------------------------------------


def _traffic(plan: Plan, unit: Unit, scheduled: dict[str, int], found: Sequence[CompiledCollective]) -> UnitTraffic:
    own = [c for c in found if c.unit == unit.name and not c.number and "tensor" not in c.axes]
    gathered = sum(c.step_bytes for c in own if c.kind == "all_gather")
    reductions = [c for c in own if c.kind in ("all_reduce", "reduce_scatter")]
    if unit.layout == "replicated":
        reduced, copies = 0, sum(c.step_bytes for c in reductions)
    else:
        reduced = sum(c.step_bytes for c in reductions if "shard" in c.axes)
        at_once = sum(c.step_bytes for c in reductions if c.axes == ("replicate", "shard"))
        copies = at_once // plan.mesh.shard + sum(c.step_bytes for c in reductions if c.axes == ("replicate",))
    pairs = (scheduled["gather"], gathered), (scheduled["reduce"], reduced), (scheduled["all_reduce"], copies)
    return UnitTraffic(unit.name, *pairs)


def _deviations(plan: Plan, unit: Unit, traffic: UnitTraffic) -> Iterator[tuple[bool, str]]:
    """(whether it is meant to be, sentence) for everything that differs."""
    wanted, found = traffic.gathered
    loop = plan.batch.accumulate
    once = loop > 1 and found and found * loop in ((wanted, wanted // 2) if unit.reshard is True else (wanted,))
    if once:  # what it gathers is the same in all of them
        yield True, f"{unit.name}: gathered once for all {loop} micro-batches: XLA moved it out of their loop"
    elif loop > 1 and unit.reshard is True and found * 2 * loop == wanted * (loop + 1):
        yield (
            True,
            f"{unit.name}: gathered once for the forward of all {loop} micro-batches: XLA moved it out of their loop, which "
            "keeps it in memory",
        )
    elif wanted // 2 <= found < wanted and unit.reshard is True:
        yield True, f"{unit.name}: {bytes_text(wanted - found)} are not gathered again, since backward does not need them"
    elif found != wanted:
        yield False, f"{unit.name}: gathers {bytes_text(found)}, not {bytes_text(wanted)}"
    narrow = ITEM_BYTES[plan.precision.compute] / ITEM_BYTES[plan.precision.reduce]
    for (wanted, found), what in ((traffic.reduced, "reduces"), (traffic.copies, "all-reduces between copies")):
        if found != wanted:
            products = wanted * narrow <= found < wanted
            why = f": XLA reduces matrix products in {plan.precision.compute}" if products else ""
            yield products, f"{unit.name}: {what} {bytes_text(found)}, not {bytes_text(wanted)}{why}"


def _program_notes(state: JaxState, found: Sequence[CompiledCollective]) -> Iterator[str]:
    layouts = {u.name: u.layout for u in state.executed.units}
    slices = any(c.kind == "all_reduce" and not c.number and layouts.get(c.unit) in ("sharded", "optimizer") for c in found)
    if slices and state.executed.mesh.shard > 1:
        platform = state.shardings.mesh.devices.flat[0].platform
        yield f"XLA on {platform} writes a reduce-scatter as an all-reduce and a slice; it counts as one"
    if any(p.whole for p in state.shardings.parameters.values()):
        yield from state.notes
    if tensor := sum(c.step_bytes for c in found if "tensor" in c.axes):
        yield f"the tensor axis moves {bytes_text(tensor)}, which the schedule leaves to the model"
