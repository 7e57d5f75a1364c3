"""What the table of choices is made of: a choice is a field of a part of the plan, declared with `choice(…)`.

From its row follow the recipe's key, the command line's option, `--fix`, the page's control, the plan's JSON, the reference
pages and the refusals of engines. Standard library only.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin

from fullshard.base.errors import FullshardError, nearest
from fullshard.base.reading import LARGEST_INTEGER
from fullshard.plan.engine_traits import EngineLimit

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
# Says why the value of a choice has no effect, as the end of a sentence; empty if it has one.
Idle = Callable[[Any], str]


class PlanError(FullshardError):
    """A plan, or a field of one, that makes no sense."""


@dataclass(frozen=True)
class Choice:
    """One decision of a plan: a row of the table.

    `path`: as the plan's JSON spells it; empty if the choice is a strategy's. `name`: as recipes, options, `--fix` and the page
    do; empty if only plans have it. `owner`: the part that it is a field of. `kind`: the type of its values, `object` for
    several. `words`: the values, if they are words. `default`: the plan's. `nullable`: None is a value, too.
    """

    field: str
    path: str
    owner: str
    kind: type
    words: tuple[str, ...]
    default: Any
    nullable: bool
    help: str  # a sentence for reference pages and --help
    name: str = ""
    recipe: str = ""  # its key in recipes; empty if they have none
    option: str = ""  # of the command line, where that is not its name
    guide: str = ""  # the page that explains it
    label: str = ""  # of its control on the page; without one it is among the further choices
    least: int = 1
    unset: str = ""  # what None is, in words
    open: bool = False  # where nothing is given, the planner chooses
    fixable: bool = True  # a search can keep it
    absent: bool = False  # from JSON while it has its default: it is younger than the format's version
    needs: tuple[str, tuple[str, ...]] | None = None  # another choice, and the values beside which this one means something
    idle: Idle | None = None  # of its part
    idle_in_plan: Idle | None = None
    limits: Mapping[str, EngineLimit] = dataclasses.field(default_factory=dict)  # by engine

    @property
    def flag(self) -> str:
        """The option of the command line."""
        return "--" + (self.option or self.name).replace("_", "-").replace(".", "-")

    def check(self, value: object, spelled: str) -> None:
        """Raise unless the value is of the choice's type."""
        if self.nullable and value is None:
            return
        if self.words:
            check_word(spelled, value, self.words)
        elif self.kind is bool and not isinstance(value, bool):
            raise PlanError(f"{spelled} must be true or false, not {value!r}")
        elif self.kind is int:
            check_positive_integer(spelled, value)
        elif self.kind is float:
            checked_share(spelled, value)

    def fixed(self, value: object) -> object:
        """The value that a search is to keep, in the choice's type; raise if it has another."""
        if self.kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, self.kind) or isinstance(value, bool) != (self.kind is bool):
            raise FullshardError(f"{self.name} = {value!r} is not {KINDS[self.kind]}")
        if self.owner in ("", "units[]") and self.words and value not in self.words:  # parts say so themselves
            known = ", ".join(self.words)
            raise FullshardError(f"unknown {self.name} {value!r}{nearest(str(value), list(self.words))} (known: {known})")
        return value

    def refuse_idle(self, part: Any, plan: Any = None) -> None:
        """Raise if the choice's value has no effect beside the part's others; with a plan, beside the plan's."""
        why, value = self.idle if plan is None else self.idle_in_plan, getattr(part, self.field)
        if why is not None and value != self.default and (end := why(part if plan is None else plan)):
            raise PlanError(f"{self.spelled(value)} has no effect{end}")

    def spelled(self, value: object) -> str:
        return self.path if value is True else f"{self.path} = {value!r}"

    def limit(self, engine: str, value: object) -> EngineLimit | None:
        """Why the engine cannot do this value; None if it can."""
        limit = self.limits.get(engine)
        refused = limit is not None and (limit.refused(value) if limit.refused else value != self.default)
        return limit if refused else None


def choice(default: Any, help: str, **about: Any) -> Any:
    """A field of a part of a plan that is a choice. `about`: the fields of `Choice` that do not follow from the declaration."""
    return dataclasses.field(default=default, metadata={"help": help, **about})


def choices_of(part: type) -> tuple[Choice, ...]:
    """The rows of a part."""
    if part not in _ROWS:
        _ROWS[part] = tuple(_rows(part))
    return _ROWS[part]


_ROWS: dict[type, tuple[Choice, ...]] = {}


def _rows(part: Any) -> Iterator[Choice]:
    hints = typing.get_type_hints(part)
    for f in dataclasses.fields(part):
        if "help" in f.metadata:
            kind, words, nullable = _type(hints[f.name])
            path, name = part.PATH.format(f.name), f.metadata.get("name", part.NAME.format(f.name))
            recipe = name if "." in name or not name else f"plan.{name}"
            about = {"name": name, "recipe": recipe, "limits": part.LIMITS} | f.metadata
            yield Choice(f.name, path, path.rpartition(".")[0], kind, words, f.default, nullable, **about)


class Part:
    """A part of a plan: a frozen dataclass whose fields are choices. `PATH` and `NAME`: how a plan and everything else spell
    them, with the field's name for `{}`. `LIMITS`: why an engine cannot do any of them."""

    PATH: ClassVar[str] = "{}"
    NAME: ClassVar[str] = ""
    LIMITS: ClassVar[Mapping[str, EngineLimit]] = {}

    def __str__(self) -> str:
        return ", ".join(f"{row.field} {getattr(self, row.field)}" for row in choices_of(type(self)))

    def idle_in(self, plan: Any) -> str:
        """Why nothing of the part has an effect in this plan; empty if something has."""
        return ""


def check_choices(part: Any, before: str = "") -> None:
    """Raise unless all choices of a part have values of their types, and an effect beside each other. `before`: what messages
    write before a field's name; by default its path."""
    rows = choices_of(type(part))
    for row in rows:
        row.check(getattr(part, row.field), f"{before}{row.field}" if before else row.path)
    for row in rows:
        row.refuse_idle(part)


def _type(hint: Any) -> tuple[type, tuple[str, ...], bool]:
    """The type of values, the words among them, and whether None is one."""
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    value_kinds = [kind for kind in kinds if kind is not type(None)]
    if len(value_kinds) > 1:
        return object, (), len(value_kinds) < len(kinds)
    words = get_args(value_kinds[0]) if get_origin(value_kinds[0]) is Literal else ()
    return str if words else get_origin(value_kinds[0]) or value_kinds[0], words, len(value_kinds) < len(kinds)


# -- checks ------------------------------------------------------------------------------------------


def check_positive_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} must be a positive integer, not {value!r}")
    if value > LARGEST_INTEGER:
        raise PlanError(f"{name} must be a positive integer of at most 64 bits, not one of {value.bit_length()}")


def checked_share(name: str, value: object) -> float:
    """The value as a float; raise unless it is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise PlanError(f"{name} must be a number from 0 to 1, not {value!r}")
    return float(value)


def check_word(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PlanError(f"{name} must be one of {', '.join(known)}, not {value!r}{nearest(str(value), list(known))}")
