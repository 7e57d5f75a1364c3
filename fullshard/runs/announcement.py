"""What a run says of itself before its ranks start: the recipe where it differs from the defaults, and the plan in short."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.base.text import labelled
from fullshard.plan.plan_text import plan_summary
from fullshard.runs.prepare.plan_choices import choice_lines
from fullshard.runs.prepare.prepare import Prepared
from fullshard.runs.recipe.recipe import Recipe
from fullshard.runs.recipe.recipe_sections import OWN, OptimSection, RecipeSection
from fullshard.runs.resuming import resumed_from

LONGEST = 48  # characters of a value


def announcement(prepared: Prepared, run: Path, resume: str | None) -> str:
    """What a run will do, in some ten lines. Its directory gets the whole recipe and plan."""
    recipe, choices = "\n".join(recipe_lines(prepared.recipe)), "\n".join(choice_lines(prepared.choices))
    return f"{recipe}\n\n{plan_summary(prepared.plan)}\n{choices}\n\n{_task(prepared, run, resume)}"


def dry_run_text(prepared: Prepared, run: Path, resume: str | None) -> str:
    """The whole recipe and plan, and what a run would do."""
    choices = "\n".join(choice_lines(prepared.choices))
    about = f"{prepared.recipe.model_dump_json(indent=1)}\n\n{prepared.plan}\n\n{choices}"
    return f"{about}\n\ndry run, nothing is started or written; it would be: {_task(prepared, run, resume)}"


def _task(prepared: Prepared, run: Path, resume: str | None) -> str:
    """How many steps into which directory, and what they begin with."""
    recipe = prepared.recipe
    if resumed := resumed_from(prepared.recipe, run, resume) if resume else None:
        place, manifest = resumed
        if manifest.step >= recipe.steps:
            return f"no steps: all {recipe.steps} are done in {place}"
        return f"steps {manifest.step + 1} to {recipe.steps} into {run}, from {place}"
    weights = f"weights from {prepared.weights}" if prepared.weights else "weights drawn"
    return f"{recipe.steps} steps into {run}, {weights}"


# -- the recipe ---------------------------------------------------------------------------------------------


def recipe_lines(recipe: Recipe) -> Iterator[str]:
    """A line for each section that has other values than the defaults, and more where it would be too long."""
    for section, values in differences(recipe).items():
        yield from labelled(section, [f"{key} = {_value(value)}" for key, value in values.items()])


def differences(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The values that are not the defaults, by section and key."""
    changed = {}
    for name in type(recipe).model_fields:
        section = getattr(recipe, name)
        values = _own_values(section) if section is not None else {}
        if values:
            changed[name] = values
    return changed


def _own_values(section: RecipeSection) -> dict[str, Any]:
    defaults = {key: field.default for key, field in type(section).model_fields.items()}
    if isinstance(section, OptimSection):
        defaults |= OWN.get(section.name, {})
    return {key: value for key, value in section.model_dump(mode="python").items() if value != defaults[key]}


def _value(value: Any) -> str:
    """As in a recipe; what is long is cut."""
    text = "none" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
