"""A recipe in the making, with what became of every key of the file that it is made from."""

import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.runs.recipe.recipe import FILL_IN

UNKNOWN = "this key is unknown to `fullshard migrate`; look whether it changes what is trained"
OFF = "it is switched off there"


@dataclass(frozen=True)
class Entry:
    """A value of the recipe and the comment that stands beside it. `assumed`: the file does not say it."""

    value: Any
    comment: str
    assumed: bool = False


@dataclass
class Draft:
    """`system`: whose file it is. `leaves`: the file's values by dotted key. Each ends in one of `carried`, `idle` (it has no
    effect here) and `lost` (it is not carried over, with what to do)."""

    system: str
    leaves: dict[str, Any]
    ranks: int | None = None  # that the file was written for
    entries: dict[str, Entry] = field(default_factory=dict)  # by recipe key
    carried: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        return self.leaves.get(key, default)

    def number(self, key: str) -> float | int | None:
        """The number of a key; None where it is absent or `auto`."""
        value = self.get(key)
        if isinstance(value, str):
            value = _number(value)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def whole(self, key: str) -> int | None:
        """As `number`, of a count: JSON files write 1e9."""
        number = self.number(key)
        if number is not None and (number != int(number) or number < 0):
            raise FullshardError(f"{key} = {number!r} must be a whole number of at least 0; mend it in the file")
        return None if number is None else int(number)

    def word(self, key: str, default: Any = None) -> Any:
        """The value of a key if it is a plain one; otherwise its text, which no table of known values has."""
        value = self.get(key, default)
        return value if value is None or isinstance(value, str | int | float) else show(value)

    def degree(self, key: str, default: int) -> int:
        """The number of ranks of an axis: 1 or more, or -1 for what is left."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
            raise FullshardError(f"{key} = {show(value)} must be a number of ranks; mend it in the file")
        return value

    def carry(self, source: str | Iterable[str], key: str, value: Any, note: str = "") -> None:
        """Set a key of the recipe from keys of the file."""
        sources = [source] if isinstance(source, str) else list(source)
        for one in sources:
            self.carried[one] = key
        said = ", ".join(f"{one} = {show(self.leaves[one])}" for one in sources)
        self.entries[key] = Entry(value, f"{said}{'; ' + note if note else ''}")

    def carry_or_default(self, source: str, key: str, value: Any, default: Any) -> None:
        """Set a key of the recipe from one of the file, or from its system's default where the file has none."""
        if source in self.leaves and value is not None:
            self.carry(source, key, value)
        else:
            self.default(key, default)

    def default(self, key: str, value: Any) -> None:
        """Set a key that the file leaves to its system's default, where the recipe's own differs."""
        self.entries.setdefault(key, Entry(value, f"the default of {self.system}"))

    def assume(self, key: str, value: Any, reason: str) -> None:
        """Set a key that nobody said, unless it is there."""
        self.entries.setdefault(key, Entry(value, reason, assumed=True))

    def ignore(self, source: str, reason: str) -> None:
        self._assign(self.idle, source, reason)

    def lose(self, source: str, reason: str) -> None:
        self._assign(self.lost, source, reason)

    def drop(self, source: str, reason: str) -> None:
        """`lose` a key that says something; `ignore` one that is switched off."""
        value = self.get(source)
        said = value not in (False, None, 0, "", "no", "none") and value != [] and value != {}
        if said:
            self.lose(source, reason)
        else:
            self.ignore(source, OFF)

    def assign_rest(self, idle: Mapping[str, str], lost: Mapping[str, str]) -> None:
        """Say of the keys that are left what becomes of them, by patterns: those of `lost` first."""
        for source in self.leaves:
            if self.is_assigned(source):
                continue
            if why := _match(source, lost):
                self.drop(source, why)
            elif why := _match(source, idle):
                self.ignore(source, why)
            else:
                self.lose(source, UNKNOWN)

    def is_assigned(self, source: str) -> bool:
        return source in self.carried or source in self.idle or source in self.lost

    def _assign(self, where: dict[str, str], source: str, reason: str) -> None:
        if source in self.leaves and not self.is_assigned(source):
            where[source] = reason


def flatten(value: Any, before: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted key. An empty table is a value."""
    if not isinstance(value, dict) or not value:
        return {before: value} if before else {}
    return {k: v for key, inner in value.items() for k, v in flatten(inner, f"{before}.{key}" if before else str(key)).items()}


def show(value: Any) -> str:
    """A value in one short line."""
    try:
        text = json.dumps(value)
    except TypeError:  # a date of YAML or TOML
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def finish(draft: Draft) -> None:
    """Fill what every recipe needs and the file does not say."""
    draft.assume("model.name", FILL_IN, "a preset, a Hugging Face directory, or file.py:callable")
    draft.assume("data.path", FILL_IN, "a directory that `fullshard data pack` made")
    draft.assume("data.sequence", 1024, "tokens in a sample")
    draft.default("plan.compute", "fp32")
    draft.assume("optim.name", "adamw", "the optimizer")
    draft.assume("optim.lr", 1e-4, "the learning rate")
    draft.assume("schedule.kind", "cosine", "how the learning rate falls")
    draft.assume("train.micro_batch", 1, "samples of a rank at a time")
    draft.assume("train.global_batch", 8 * draft.entries["train.micro_batch"].value, "samples of a step over all ranks")
    if "train.tokens" not in draft.entries:
        warmup = draft.entries.get("schedule.warmup")
        steps = max(1000, 10 * warmup.value if warmup else 0)
        draft.assume("train.steps", steps, "the length of the run")


def _match(source: str, patterns: Mapping[str, str]) -> str:
    return next((why for pattern, why in patterns.items() if fnmatch.fnmatchcase(source, pattern)), "")


def _number(text: str) -> float | int | None:
    """YAML reads 1e-4 as text."""
    try:
        return float(text)
    except ValueError:
        return None
