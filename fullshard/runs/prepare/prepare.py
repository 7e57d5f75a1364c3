"""From a recipe to everything that a run needs: read, open, describe, plan, check. What can be refused before the first step is
refused here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.status import say
from fullshard.checkpoint.directories import Place, open_place
from fullshard.cluster.topology import Cluster
from fullshard.engine.engine import Engine, load_engine
from fullshard.plan.engine_traits import DEFAULT_ENGINE
from fullshard.plan.plan import Plan
from fullshard.planner.device_limits import refuse_on_devices
from fullshard.planner.estimate import refuse_idle_loss_kernel
from fullshard.runs.prepare.describe_model import describe_model, described_units
from fullshard.runs.prepare.disk_space import filed_bytes, free_disk, refuse_full_disk
from fullshard.runs.prepare.open_data import open_data, refuse_first_batch
from fullshard.runs.prepare.open_inputs import Inputs, open_inputs
from fullshard.runs.prepare.plan_choices import Asked, asked_of
from fullshard.runs.prepare.rank_identity import from_first, identity, refuse_disagreement
from fullshard.runs.prepare.recipe_plan import RecipePlan, make_optimizer, plan_recipe, run_loss
from fullshard.runs.recipe.recipe import Recipe


@dataclass(frozen=True)
class Prepared(RecipePlan, Inputs):
    """A recipe that was checked against its model, its data and the number of ranks; its plan."""

    recipe: Recipe
    engine: Engine[Any, Any]


def prepare(
    recipe: Recipe, ranks: int | None, engine: Engine[Any, Any] | None = None, kept: dict[str, Any] | None = None
) -> Prepared:
    """Check the recipe against its model, its data and this many ranks. `ranks`: by default all GPUs, or 2. `engine`: by
    default torch's. `kept`: what is left open as a checkpoint has it, see `kept_choices`."""
    engine = engine or load_engine(DEFAULT_ENGINE)
    asked = read(recipe, ranks if ranks is not None else engine.machine.local_devices(), engine, kept)
    inputs = open_inputs(recipe, engine)
    say("planning")
    described = describe_model(asked, inputs.model, inputs.data, engine)
    return check(recipe, inputs, plan_recipe(asked, described), engine)


def prepare_together(
    recipe: Recipe, engine: Engine[Any, Any], kept: Callable[[], dict[str, Any]], told: dict[str, Any]
) -> Prepared:
    """As `prepare`, on all ranks: each opens what it reads, and the first one plans for all. `kept`: called on the first rank.
    `told`: what else the ranks were told. Collective."""
    inputs = engine.ranks.agreement().all_or_none(lambda: open_inputs(recipe, engine))
    refuse_disagreement(engine.ranks.agreement().all_or_none(lambda: identity(recipe, inputs, engine) | told), engine.ranks)

    def plan() -> RecipePlan:
        asked = read(recipe, engine.ranks.all_devices(), engine, kept())
        say("planning")
        return plan_recipe(asked, describe_model(asked, inputs.model, inputs.data, engine))

    planned = from_first(plan, engine.ranks)
    return engine.ranks.agreement().all_or_none(lambda: check(recipe, inputs, planned, engine))


def reopen_data(prepared: Prepared) -> Prepared:
    """The same on a copy of the process that prepared it, with open files of its own."""
    data, valid = open_data(prepared.recipe, prepared.model, prepared.engine)
    return replace(prepared, data=data, valid=valid)


def read(recipe: Recipe, ranks: int, engine: Engine[Any, Any], kept: dict[str, Any] | None) -> Asked:
    """What the recipe asks of the cluster that it names, or of the devices that are there."""
    if ranks < 1:
        raise FullshardError(f"ranks must be at least 1, not {ranks}")
    found = Cluster.load(recipe.plan.cluster) if recipe.plan.cluster else engine.machine.local_cluster(ranks)
    if found.devices != ranks:
        found = replace(found, devices=ranks)  # a file of `measure` tells of one machine
    if recipe.disk.path is not None:
        found = found.with_disk(max(1, free_disk(recipe.disk.path, ranks)))
    return asked_of(recipe, found, kept, engine.name)


def check(recipe: Recipe, inputs: Inputs, planned: RecipePlan, engine: Engine[Any, Any]) -> Prepared:
    """Refuse what the engine, the devices, the disk or the model cannot do."""
    plan, model, directory = planned.plan, inputs.model, disk_of(recipe, planned.plan)
    engine.model.refuse(model, plan, make_optimizer(recipe), directory)
    refuse_on_devices(plan, planned.cluster)
    refuse_idle_loss_kernel(plan, recipe.loss)
    if directory:
        filed = (
            planned.estimate.disk.allocated_bytes  # activations included
            if planned.estimate
            else filed_bytes(plan, described_units(recipe, model, engine.model), make_optimizer(recipe))
        )
        refuse_full_disk(directory, filed, plan.mesh.devices)
    for part in (inputs.data, *([inputs.valid] if inputs.valid else [])):
        batch = refuse_first_batch(recipe, plan, part)
        if engine.trainer.refuse_batch:
            engine.trainer.refuse_batch(model, engine.trainer.named_loss(run_loss(recipe)), batch)
    return Prepared(**vars(inputs), **vars(planned), recipe=recipe, engine=engine)


def disk_of(recipe: Recipe, plan: Plan) -> str | None:
    """The directory for what the plan puts on disk."""
    on_disk = [u.name for u in plan.units if "disk" in (u.home.params, u.home.optimizer, u.home.activations)]
    if on_disk and recipe.disk.path is None:
        raise FullshardError(f"unit {on_disk[0]} of the plan has a home on disk; write disk.path, a directory there")
    if recipe.disk.path is not None and not on_disk and recipe.plan.file is not None:
        raise FullshardError("disk.path has no effect: no unit of the plan has a home on disk; leave it out")
    return recipe.disk.path if on_disk else None


def checkpoint_dir_of(recipe: Recipe, directory: Path) -> Place:
    """Where a run's checkpoints lie."""
    return open_place(recipe.checkpoint.path or directory / "checkpoints")
