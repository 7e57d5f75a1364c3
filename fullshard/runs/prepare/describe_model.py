"""The model of a recipe described: its units, and what computing them costs as far as planning needs to know."""

from dataclasses import dataclass
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.status import say
from fullshard.data.training_data import TrainingData
from fullshard.engine.engine import Engine
from fullshard.engine.model import Models, ModelT, TraceCosts
from fullshard.model import presets
from fullshard.model.description import Description
from fullshard.model.description_cache import cached_description
from fullshard.plan.plan import DType
from fullshard.runs.prepare.open_data import largest_batch
from fullshard.runs.prepare.plan_choices import Asked
from fullshard.runs.recipe.recipe import Recipe


@dataclass(frozen=True)
class Described:
    """`units`: the model's, without costs. `costs`: the description with those; None where they are unknown or not needed."""

    units: Description
    costs: Description | None


def describe_model(asked: Asked, model: Any, data: TrainingData, engine: Engine[Any, Any]) -> Described:
    """Describe the model that a plan is asked for, with the costs that choosing the plan takes."""
    units = described_units(asked.recipe, model, engine.model, experts=asked.recipe.plan.expert > 1)
    known = _preset_costs(asked)
    if known is None and _needs_costs(asked):
        known = _traced_costs(asked, model, data, engine)
    return Described(units, known)


def described_units(recipe: Recipe, model: ModelT, models: Models[ModelT], *, experts: bool = False) -> Description:
    """The model's units, as the recipe's rules group them. What they cost is not traced."""
    return models.describe(model, title=recipe.model.name, experts=experts, **recipe.plan.unit_rules)


def describe_costs(recipe: Recipe, model: Any, engine: Engine[Any, Any], compute: DType) -> Description:
    """The model with its costs, which are kept on disk unless adapters or rules for units change the description."""
    rules, name, sequence = recipe.plan.unit_rules, recipe.model.name, recipe.sequence

    def trace() -> Description:
        return _tracer(engine, name)(model, title=name, micro_batch=1, sequence=sequence, compute=compute, **rules)

    own = recipe.lora or recipe.model.call or any(rules.values())
    return trace() if own else cached_description(name, sequence=sequence, compute=compute, make=trace)


def _tracer(engine: Engine[Any, Any], title: str) -> TraceCosts[Any]:
    """The engine's; raise where it has none."""
    if engine.model.trace_costs is None:
        raise FullshardError(
            f"on {engine.traits.word} the costs of presets alone are known, not those of {title}; name a strategy, as in "
            "plan.strategy = 'zero3'. A Hugging Face directory can be planned by `fullshard plan DIR --cluster C --engine "
            f"{engine.name}`"
        )
    return engine.model.trace_costs


def has_costs(description: Description, compute: str) -> bool:
    """Whether what the model costs is known in this dtype."""
    return description.costs is not None and any(key[0] == compute for key in description.costs.traces)


def _preset_costs(asked: Asked) -> Description | None:
    """The preset's description, if that is what the recipe trains and its costs are known in its dtype."""
    recipe = asked.recipe
    own = recipe.lora or any(recipe.plan.unit_rules.values())  # other parameters or units than the preset's
    if own or recipe.data.objective != "causal" or recipe.model.name not in presets.PRESETS:
        return None
    found = presets.describe(recipe.model.name)
    return found if has_costs(found, asked.compute) else None


def _needs_costs(asked: Asked) -> bool:
    """Whether the plan is chosen by costs. Of a named strategy a CPU leaves little to choose: tracing would take longer than it
    saves."""
    wanted = asked.recipe.plan
    if asked.plan is not None or wanted.wanted == "auto":
        return asked.plan is None
    return wanted.tensor == 1 and (asked.cluster.device.kind != "cpu" or wanted.cluster is not None)


def _traced_costs(asked: Asked, model: Any, data: TrainingData, engine: Engine[Any, Any]) -> Description | None:
    """The model with its costs; None if it cannot be traced, unless the recipe asks for a strategy that needs them."""
    recipe, wanted = asked.recipe, asked.recipe.plan
    if wanted.wanted != "auto":
        say("tracing the model, to choose what the recipe leaves open")
    try:
        if recipe.data.objective == "causal":
            return describe_costs(recipe, model, engine, asked.compute)
        say("tracing a batch of the data")
        example, loss = largest_batch(recipe, data), engine.trainer.named_loss(recipe.loss)
        trace = _tracer(engine, recipe.model.name)
        return trace(model, title=recipe.model.name, example=example, loss=loss, compute=asked.compute)
    except FullshardError as error:
        if wanted.strategy == "auto":
            raise
        then = "The strategy is zero3" if wanted.wanted == "auto" else "What the recipe leaves open is not chosen by costs"
        say(f"{error}. {then}")
        return None
