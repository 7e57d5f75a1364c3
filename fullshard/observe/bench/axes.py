"""The axes of a benchmark: keys of a recipe, each with the values to try, and their product."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from fullshard.base.errors import FullshardError, nearest
from fullshard.plan.choice_table import NAMED, TABLE
from fullshard.runs.recipe.recipe import Recipe, parse_value

# A key that only means something with certain values of another one. Elsewhere it is left out, so that one command can
# try strategies that take different keys.
OWNERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    row.recipe: (NAMED[row.needs[0]].recipe, row.needs[1]) for row in TABLE if row.recipe and row.needs
}
UNUSED = ("eval", "sample", "checkpoint", "log", "schedule", "profile")  # sections that no case reads
UNTIMED = ("steps", "tokens", "hang_seconds", "max_skips", "on_divergence", "max_rollbacks")  # keys of `train` that none reads
Choices = dict[str, Any]  # values by key


@dataclass(frozen=True)
class Axis:
    """A key of the recipe, `section.key`, and its values."""

    key: str
    values: tuple[Any, ...]

    @property
    def name(self) -> str:
        """How tables call it: the key, with its section where that belongs to its meaning."""
        section, _, key = self.key.partition(".")
        return key if section in ("plan", "train", "data") else self.key


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Read `key=value,value` texts. Raises for an unknown key or a value that the key cannot have."""
    axes: dict[str, Axis] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values.strip():
            raise FullshardError(f"{text!r} is no choice to try; write KEY=VALUE,VALUE, for example strategy=ddp,zero3")
        key = full_key(name.strip())
        if key in axes:
            raise FullshardError(f"{key} is given twice; write its values after one another, as in {name}=A,B")
        parsed = tuple(dict.fromkeys(_checked(key, parse_value(text, part.strip())) for part in split_values(values)))
        axes[key] = Axis(key, parsed)
    return list(axes.values())


def known_keys() -> dict[str, Any]:
    """The keys of a recipe that can be tried, each with its field."""
    kinds = {name: _section(field.annotation) for name, field in Recipe.model_fields.items() if name not in UNUSED}
    every = {f"{name}.{key}": field for name, kind in kinds.items() for key, field in kind.model_fields.items()}
    return {key: field for key, field in every.items() if key not in {f"train.{name}" for name in UNTIMED}}


def full_key(name: str) -> str:
    """`section.key` for a key. The section may be left out where only one has such a key."""
    known = known_keys()
    fitting = [key for key in known if key == name or key.partition(".")[2] == name]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise FullshardError(f"{name} is a key of several sections; write {' or '.join(fitting)}")
    short = [key.partition(".")[2] for key in known]
    hint = "; --steps sets the timed steps" if name.endswith("steps") else nearest(name, [*known, *short])
    raise FullshardError(f"unknown key {name!r}: it is none of a recipe's that change a step{hint}")


def split_values(text: str) -> list[str]:
    """The values between commas, except those inside brackets or quotes."""
    return re.findall(r"(?:\[[^\]]*\]|\"[^\"]*\"|'[^']*'|[^,\[\"'])+", text)


def _checked(key: str, value: Any) -> Any:
    """The value, if the key can have it."""
    field = known_keys()[key]
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    try:
        TypeAdapter(kind).validate_python(value, strict=not isinstance(value, list))
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        kinds = (field.annotation, *get_args(field.annotation))  # a Literal may be one of several
        words = [str(word) for one in kinds if get_origin(one) is Literal for word in get_args(one)]
        raise FullshardError(f"{key} = {value!r}: {message[0].lower()}{message[1:]}{nearest(str(value), words)}") from None
    return tuple(value) if isinstance(value, list) else value


def _section(annotation: Any) -> type[BaseModel]:
    return next((a for a in get_args(annotation) if a is not type(None)), annotation)


def product(axes: Sequence[Axis], base: Choices) -> list[Choices]:
    """The combinations, in the order of the axes, the last one changing fastest. `base`: what the recipe says, as
    `section.key`. A key is left out where it has no meaning; what is then the same is tried once."""
    combinations: list[Choices] = []
    for values in itertools.product(*(axis.values for axis in axes)):
        chosen = dict(zip([axis.key for axis in axes], values, strict=True))
        kept = {key: value for key, value in chosen.items() if _means(key, base | chosen)}
        if kept not in combinations:
            combinations.append(kept)
    return combinations


def _means(key: str, choices: Choices) -> bool:
    owner, values = OWNERS.get(key, ("", ()))
    return not owner or choices.get(owner, _default(owner)) in values


def _default(key: str) -> Any:
    return known_keys()[key].default
