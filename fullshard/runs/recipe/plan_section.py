"""The recipe's tables of the plan: a key for each choice that recipes have, and the choices that they make."""

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, create_model, model_validator

from fullshard.plan.choice import Choice, PlanError
from fullshard.plan.choice_table import NAMED, TABLE, renamed, strategy_arguments
from fullshard.plan.plan import Precision
from fullshard.plan.unit_choices import StrategyName
from fullshard.runs.recipe.recipe_sections import RecipeSection, changed

UNIT_RULES = ("classes", "names", "min_params")  # keys that say which modules are units
UNSEARCHED = {row.name for row in TABLE if row.recipe.startswith("plan.") and not row.fixable}  # a search does not make these
NAMED_ONLY = (*sorted(UNSEARCHED), *UNIT_RULES)  # keys that only named strategies have


def _keys(section: str) -> dict[str, Any]:
    """The keys of a section, as pydantic takes them: None where the planner chooses."""
    rows = {key: row for row in TABLE for table, _, key in [row.recipe.partition(".")] if table == section}
    return {key: (_type(row), Field(None if row.open else row.default, **_bounds(row))) for key, row in rows.items()}


def _type(row: Choice) -> Any:
    kind: Any = Literal[row.words] if row.words else tuple[str, ...] if row.kind is tuple else row.kind
    return kind | None if row.open or row.nullable else kind


def _bounds(row: Choice) -> dict[str, Any]:
    if row.kind is int:
        return {"gt": 0} if row.least == 1 else {"ge": row.least}
    return {"strict": False} if row.kind is tuple else {"ge": 0, "le": 1} if row.kind is float else {}  # TOML has lists


class _Keys(RecipeSection):
    """A section whose keys the table has."""

    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any: ...


_PlanKeys: Any = create_model("_PlanKeys", __base__=_Keys, **_keys("plan"))
_HomeKeys: Any = create_model("_HomeKeys", __base__=_Keys, **_keys("home"))


class PlanSection(_PlanKeys):
    """The plan: a `file`, or a strategy with its choices. The planner makes the choices that are None; with the strategy
    `auto`, all that are not given, within `limit`. `classes`, `names` and `min_params` say which modules are units. `cluster`
    (by default the devices that are there) is what the plan is found and predicted for. `plan = "zero3"`, `plan = "auto"` and
    `plan = "plan.json"` are short for a table with that one key."""

    file: str | None = None
    strategy: Literal["auto", StrategyName] | None = None
    cluster: str | None = None
    limit: str | None = None
    classes: tuple[str, ...] = Field((), strict=False)
    names: tuple[str, ...] = Field((), strict=False)
    min_params: int = Field(0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return short_plan(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _file_or_strategy(self) -> Self:
        if self.file is not None and (extra := changed(self) - {"file", "cluster"}):
            raise ValueError(f"{min(extra)} has no effect beside file; change the plan file instead")
        if self.limit is not None and self.wanted != "auto":
            raise ValueError(f"limit has no effect with strategy = '{self.wanted}'; write strategy = 'auto', or leave it out")
        for key in NAMED_ONLY:
            if self.wanted == "auto" and key in changed(self):
                raise ValueError(f"{key} has no effect with strategy = 'auto'; name the strategy, or leave it out")
        return self

    @model_validator(mode="after")
    def _what_has_an_effect(self) -> Self:
        """Refuse choices without effect beside the others of their part. A part of which a choice is still open is checked
        when the plan is made."""
        given = choices_of_section(self)
        unknown = {
            row.owner for row in TABLE if row.owner and given.get(row.name) is None and (row.open or row.name not in given)
        }
        try:
            strategy_arguments({name: value for name, value in given.items() if NAMED[name].owner not in unknown}, str)
        except PlanError as error:
            raise ValueError(renamed(str(error))) from None
        return self

    @property
    def wanted(self) -> str:
        """The strategy that the keys ask for: where none is named `auto`, or zero3 beside keys that only named ones have."""
        return self.strategy or ("zero3" if changed(self) & set(NAMED_ONLY) else "auto")

    @property
    def precision(self) -> Precision:
        given = {name: value for name, value in choices_of_section(self).items() if NAMED[name].owner == "precision"}
        precision: Precision = strategy_arguments(given, str)["precision"]
        return precision

    @property
    def unit_rules(self) -> dict[str, Any]:
        """Which modules are units, as `describe` takes it."""
        return {key: getattr(self, key) for key in UNIT_RULES}


class HomeSection(_HomeKeys):
    """Where parameters, optimizer state and the blocks' activations rest, by default on the device if they fit there; and how
    state is updated that rests elsewhere."""

    @model_validator(mode="after")
    def _updates_elsewhere_are_of_state_elsewhere(self) -> Self:
        for key in sorted(changed(self)):
            if (row := NAMED.get(key)) and row.needs and self.optimizer in (None, "device"):
                raise ValueError(f"{key} has no effect with optimizer = 'device'; write optimizer = 'host', or leave it out")
        return self


def choices_of_section(section: RecipeSection) -> dict[str, Any]:
    """The choices of `plan` or `home` by name; None where the planner chooses."""
    name = "plan" if isinstance(section, PlanSection) else "home"
    rows = [row for row in TABLE if row.recipe.startswith(f"{name}.")]
    return {row.name: getattr(section, row.recipe.partition(".")[2]) for row in rows}


def short_plan(text: str) -> dict[str, Any]:
    """The table that `plan = "zero3"` or `plan = "plan.json"` is short for."""
    return {"file" if text.endswith(".json") else "strategy": text}
