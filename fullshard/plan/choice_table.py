"""The table of choices: every choice of a plan, in one order; and what is done with choices by their names.

Standard library only.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fullshard.base.errors import FullshardError, nearest
from fullshard.plan.choice import Choice, Part, PlanError, choices_of
from fullshard.plan.choices import Batch, Kernels, Mesh, Precision, Prefetch, Wire
from fullshard.plan.plan import Plan
from fullshard.plan.plan_json import PARTS
from fullshard.plan.unit_choices import Home, StrategyChoices, Unit

ARGUMENTS: dict[str, type] = {name: kind for name, kind in PARTS.items() if kind is not Mesh} | {"home": Home}
TABLE: tuple[Choice, ...] = tuple(
    row
    for part in (StrategyChoices, Mesh, Precision, Unit, Batch, Prefetch, Plan, Wire, Kernels, Home)
    for row in choices_of(part)
)
NAMED: dict[str, Choice] = {row.name: row for row in TABLE if row.name}
Spell = Callable[..., str]  # writes a choice, or a choice and its value, for messages


def strategy_arguments(given: Mapping[str, Any], spell: Spell) -> dict[str, Any]:
    """Choices by name as the arguments of a strategy, which takes parts; what is None is not given. Choices without a name
    have their path. `spell`: how messages write a choice."""
    arguments = _both_depths({name: value for name, value in given.items() if value is not None}, spell)
    parts: dict[str, dict[str, Any]] = {}
    for row in TABLE:
        part = row.owner.removeprefix("units[].")
        if part in ARGUMENTS and (name := row.name or row.path) in arguments:
            parts.setdefault(part, {})[row.field] = arguments.pop(name)
    return arguments | {part: ARGUMENTS[part](**fields) for part, fields in parts.items()}


def checked_fixes(fix: Mapping[str, Any]) -> dict[str, Any]:
    """Choices that a search is to keep, by their names or by recipes' keys; with the strategy that they imply. Raise for unknown
    ones and wrong types."""
    known = {name: row for name, row in NAMED.items() if row.fixable}
    names = {row.recipe: name for name, row in known.items()}
    values = {names.get(name, name): value for name, value in fix.items()}
    for name, value in values.items():
        if name not in known:
            raise FullshardError(f"{name!r} cannot be fixed (known: {', '.join(known)}){nearest(name, list(known))}")
        values[name] = known[name].fixed(value)
    for row in known.values():
        if row.name in values and row.needs and row.needs[0] == "strategy":
            (owner,) = row.needs[1]
            if (given := values.setdefault("strategy", owner)) != owner:
                idle = f"{row.name} = {values[row.name]} has no effect with strategy = {given!r}"
                raise FullshardError(f"{idle}; leave it out, or fix {owner!r}")
    return values


def _both_depths(given: dict[str, Any], spell: Spell) -> dict[str, Any]:
    """`prefetch` as the depth of each direction that has none of its own."""
    depths = ("prefetch_forward", "prefetch_backward")
    if "prefetch" not in given:
        return given
    if all(name in given for name in depths):
        raise PlanError(f"{spell('prefetch')} has no effect beside {spell(depths[0])} and {spell(depths[1])}; leave it out")
    both = given.pop("prefetch")
    return dict.fromkeys(depths, both) | given


def renamed(sentence: str) -> str:
    """A plan's sentence as recipes say it: `wire.reduce` is `wire_reduce`, and what has no effect is named without its value."""
    names = {row.path: row.name for row in TABLE if row.path and row.name}
    sentence = re.sub("|".join(rf"\b{re.escape(path)}\b" for path in names), lambda match: names[match[0]], sentence)
    return re.sub(r"^(\S+) = \S+ has no effect", r"\1 has no effect", sentence)


def refuse_limits(plan: Plan, engine: str) -> None:
    """Raise where an engine cannot carry the plan out on any device."""
    for name, kind in PARTS.items():
        if (part := getattr(plan, name)) != kind() and (limit := kind.LIMITS.get(engine)):
            raise FullshardError(limit.sentence(f"{name} ({part})", engine))
    for before, owner in _owners(plan):
        for row in choices_of(type(owner)):
            value = getattr(owner, row.field)
            if limit := row.limit(engine, value):
                raise FullshardError(limit.sentence(f"{before}{row.path.removeprefix('units[].')} = {value!r}", engine))


def _owners(plan: Plan) -> Iterator[tuple[str, Part]]:
    """All that has choices in a plan, with how messages begin."""
    yield from (("", getattr(plan, name)) for name in PARTS)
    yield "", plan
    for unit in plan.units:
        yield f"unit {unit.name}: ", unit
        yield f"unit {unit.name}: ", unit.home
