"""`fullshard plan MODEL --devices N`: write down the plan of a named strategy."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

from fullshard.base.errors import FullshardError
from fullshard.commands.common import Classes, MinParams, Names, describe_model
from fullshard.commands.option_groups import ChoiceOptions
from fullshard.model.float8_weights import refuse_float8_tokens
from fullshard.plan.choice_table import NAMED, refuse_limits, strategy_arguments
from fullshard.plan.plan import Plan
from fullshard.planner.strategies import choose

PANEL = "Write down the plan of a strategy"
GivenChoices = Annotated[dict[str, Any], ChoiceOptions(tuple(NAMED.values()), PANEL)]


@dataclass(frozen=True)
class UnitOptions:
    """Units by hand"""

    classes: Classes = None
    names: Names = None
    min_params: MinParams = 0

    def given(self) -> dict[str, object]:
        """The options that are set, by the names that the command line has for them."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {"class" if name == "classes" else name: value for name, value in changed.items()}


def refuse_beside_cluster(choices: dict[str, Any], units: UnitOptions) -> None:
    """Raise for options that a search would not heed, with what to write instead."""
    for name, value in (choices | units.given()).items():
        text = str(value).lower() if isinstance(value, bool) else value
        fixable = name in NAMED and NAMED[name].fixable
        instead = f"--fix {name}={text}" if fixable else "--devices in its place, or leave it out"
        raise FullshardError(f"{spell_option(name)} has no effect with --cluster; write {instead}")


def strategy_plan(
    model: str, sequence: int, devices: int, choices: dict[str, Any], units: UnitOptions, engine: str = "torch"
) -> Plan:
    """The plan that the choices describe, of a model of this engine."""
    made = choose(
        choices.get("strategy", "zero3"),
        describe_model(model, units.classes, units.names, units.min_params, choices.get("expert", 1) > 1, engine=engine),
        devices=devices,
        spell=spell_option,
        **strategy_arguments(choices | {"strategy": None, "batch.sequence": sequence}, spell_option),
    )
    refuse_limits(made, engine)
    refuse_float8_tokens(made.precision, made.batch)
    return made


def spell_option(name: str, *value: object) -> str:
    """A choice as an option of the command line."""
    return " ".join([NAMED[name].flag if name in NAMED else "--" + name.replace("_", "-"), *map(str, value)])
