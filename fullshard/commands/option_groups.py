"""Options of a command in groups: a frozen dataclass, or choices of a plan."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import typer

from fullshard.plan.choice import Choice

Option = inspect.Parameter


@dataclass(frozen=True)
class ChoiceOptions:
    """Annotates a parameter of a command: an option for each of these choices. The command gets those that are given, by name.
    `defaults`: the command's own, in words."""

    rows: tuple[Choice, ...]
    panel: str | None = None
    defaults: Mapping[str, str] = field(default_factory=dict)

    def options(self) -> list[Option]:
        return [Option(_keyword(row), Option.KEYWORD_ONLY, default=None, annotation=self._type(row)) for row in self.rows]

    def collect(self, given: dict[str, Any]) -> dict[str, Any]:
        values = {row.name: given.pop(_keyword(row)) for row in self.rows}
        return {name: str(value) if isinstance(value, StrEnum) else value for name, value in values.items() if value is not None}

    def _type(self, row: Choice) -> Any:
        """The option's type and how typer shows it."""
        default = self.defaults.get(row.name) or (str(row.default) if row.default else False)
        about: dict[str, Any] = {"show_default": default, "help": row.help.replace("`", ""), "rich_help_panel": self.panel}
        words = {word: word for word in row.words}
        kind: Any = StrEnum(row.field.title(), words) if words else list[str] if row.kind is tuple else row.kind
        metavar = {int: "N", float: "N", tuple: "NAME"}.get(row.kind)
        return Annotated[kind | None, typer.Option(row.flag, metavar=metavar, **about)]


def _keyword(row: Choice) -> str:
    return (row.option or row.name).replace(".", "_")


@dataclass(frozen=True)
class FieldOptions:
    """An option for each field of a dataclass, of which the command gets one."""

    kind: Any

    def options(self) -> list[Option]:
        hints = typing.get_type_hints(self.kind, include_extras=True)
        fields = dataclasses.fields(self.kind)
        return [Option(f.name, Option.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]) for f in fields]

    def collect(self, given: dict[str, Any]) -> Any:
        return self.kind(**{f.name: given.pop(f.name) for f in dataclasses.fields(self.kind)})


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: groups of options become an option each."""
    hints = typing.get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    groups = {name: group for name in parameters if (group := _group(hints[name])) is not None}

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        made = {name: group.collect(given) for name, group in groups.items()}
        command(**given, **made)

    options: list[Option] = []
    for name, parameter in parameters.items():
        own = parameter.replace(annotation=hints[name], kind=Option.KEYWORD_ONLY)
        options += groups[name].options() if name in groups else [own]
    flat.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in options}
    del flat.__wrapped__  # else `inspect` looks through to the command's own
    return flat


def _group(hint: Any) -> ChoiceOptions | FieldOptions | None:
    choices = next((about for about in getattr(hint, "__metadata__", ()) if isinstance(about, ChoiceOptions)), None)
    return choices or (FieldOptions(hint) if dataclasses.is_dataclass(hint) else None)
