"""Options of a command in groups: a frozen dataclass each."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: each parameter that is a dataclass becomes an option for each of its fields."""
    hints = typing.get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    groups = {name: hints[name] for name in parameters if dataclasses.is_dataclass(hints[name])}

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        made = {name: kind(**{f.name: given.pop(f.name) for f in dataclasses.fields(kind)}) for name, kind in groups.items()}
        command(**given, **made)

    options: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        own = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        options += _options(groups[name]) if name in groups else [own]
    flat.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in options}
    del flat.__wrapped__  # else `inspect` looks through to the command's own
    return flat


def _options(group: Any) -> list[inspect.Parameter]:
    """A keyword for each field of a dataclass."""
    hints, kind = typing.get_type_hints(group, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in dataclasses.fields(group)]
