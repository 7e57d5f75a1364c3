"""A plan as text: its choices as a table, and the differences between two plans in sentences."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fullshard.base.text import counted, labelled, spans, table
from fullshard.plan.choice import Choice, choices_of
from fullshard.plan.choices import Wire
from fullshard.plan.plan_json import PARTS
from fullshard.plan.unit_choices import Home, Unit

if TYPE_CHECKING:
    from fullshard.plan.plan import Plan


def plan_text(plan: "Plan") -> str:
    """The choices of a plan, and a table of its units; units that are alike share a row."""
    head = [
        f"mesh       {plan.mesh} = {counted(plan.mesh.devices, 'device')} (replicate × shard × tensor)",
        f"precision  {plan.precision}",
        f"batch      {plan.batch}",
        f"prefetch   {plan.prefetch}",
        f"compile    {'each block' if plan.compile else 'no'}",
        *([] if plan.wire == Wire() else [f"wire       {plan.wire}"]),
        *([] if plan.kernels.is_auto else [f"kernels    {plan.kernels}"]),
        *([f"split      {', '.join(f'{pattern} by {how}' for pattern, how in plan.split)}"] if plan.split else []),
        *([f"staging    {plan.staging} pieces of optimizer state on the device at a time"] if plan.offloads_state else []),
        *([] if plan.cpu_share is None else [f"cpu_share  {plan.cpu_share:g} of the pieces are updated by the host's cores"]),
        *([] if plan.backlog is None else [f"backlog    {plan.backlog} pieces whose gradients wait for their update at most"]),
        f"digest     {plan.digest[:12]}",
    ]
    alike: dict[tuple[str, ...], list[str]] = {}
    for unit in plan.units:
        alike.setdefault(_choices(unit), []).append(unit.name)
    rows = [[span, *choices] for choices, names in alike.items() for span in spans(names)]
    return "\n".join(head) + "\n\n" + table(["units", "layout", "gathered until", "remat", "home"], rows)


def plan_summary(plan: "Plan") -> str:
    """The plan in a few lines: its parts, and how many units are laid out alike."""
    kinds = Counter(_choices(unit) for unit in plan.units)
    alike = [
        f"{count} {layout} (gathered until {until})" if until.startswith("end") else f"{count} {layout}"
        for (layout, until), count in Counter(choices[:2] for choices in kinds.elements()).items()
    ]
    remat = [f"remat {remat}" for remat in dict.fromkeys(choices[2] for choices in kinds)]
    homes = [f"home {home}" for home in dict.fromkeys(choices[3] for choices in kinds)]
    lines = [
        labelled("mesh", [f"{plan.mesh} = {counted(plan.mesh.devices, 'device')} (replicate × shard × tensor)"]),
        labelled("precision", str(plan.precision).split(", ")),
        labelled("batch", str(plan.batch).split(", ")),
        labelled("units", [*alike, *remat, *homes, *(["compiled"] if plan.compile else [])]),
    ]
    return "\n".join(line for part in lines for line in part)


def plan_differences(first: "Plan", second: "Plan") -> list[str]:
    """What differs from `first` to `second`, a sentence for each difference."""
    lines = list(_part_diffs(first, second))
    mine, theirs = {u.name: u for u in first.units}, {u.name: u for u in second.units}
    if gone := [n for n in mine if n not in theirs]:
        lines.append(f"only in the first plan: {', '.join(spans(gone))}")
    if new := [n for n in theirs if n not in mine]:
        lines.append(f"only in the second plan: {', '.join(spans(new))}")
    if not gone and not new and list(mine) != list(theirs):
        lines.append("the units are in another order")
    changes: dict[str, list[str]] = {}
    for name in mine:
        if name in theirs:
            for change in _unit_diffs(mine[name], theirs[name]):
                changes.setdefault(change, []).append(name)
    lines += [f"{', '.join(spans(names))}: {change}" for change, names in changes.items()]
    return lines


def _part_diffs(a: "Plan", b: "Plan") -> Iterator[str]:
    owners = [(getattr(a, name), getattr(b, name)) for name in PARTS]
    for mine, its in [*owners, (a, b)]:
        for row in choices_of(type(mine)):
            if (x := getattr(mine, row.field)) != (y := getattr(its, row.field)):
                yield f"{row.path}: {_value(row, x)} → {_value(row, y)}"


def _value(row: Choice, value: Any) -> str:
    """A value as a difference shows it: rules as a table, words for None where the choice has some."""
    if isinstance(value, bool | tuple):
        return str(dict(value)) if isinstance(value, tuple) else str(value).lower()
    return row.unset if value is None and row.unset else f"{value:g}" if isinstance(value, float) else str(value)


def _unit_diffs(a: Unit, b: Unit) -> Iterator[str]:
    if a.modules != b.modules:
        yield f"modules: {_paths(a)} → {_paths(b)}"
    for row in choices_of(Unit):
        x, y = getattr(a, row.field), getattr(b, row.field)
        if x != y or type(x) is not type(y):
            yield f"{row.field}: {x} → {y}"
    for row in choices_of(Home):
        if (x := getattr(a.home, row.field)) != (y := getattr(b.home, row.field)):
            yield f"home.{row.field}: {x} → {y}"


def _paths(unit: Unit) -> str:
    return ", ".join(m or "(root)" for m in unit.modules)


def _choices(unit: Unit) -> tuple[str, ...]:
    """The cells of a unit's row: layout, until when it stays gathered, remat and homes."""
    if unit.layout == "replicated":
        until = "always whole"
    elif unit.layout == "optimizer":
        until = "end of step"
    elif isinstance(unit.reshard, bool):
        until = "end of forward" if unit.reshard else "end of backward"
    else:
        until = f"end of forward, then {unit.reshard} ranks"
    return unit.layout, until, unit.remat, str(unit.home)
