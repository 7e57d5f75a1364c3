"""What a resumed run may change.

Nothing that the order of samples depends on; what changes the losses only with --accept-changes.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.reading import parse_json, read_text
from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Place
from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.reader import Checkpoint, refuse_mismatch
from fullshard.checkpoint.verify import problems
from fullshard.engine.engine import load_engine
from fullshard.plan.plan import Plan, Precision, Wire
from fullshard.runs.prepare.plan_choices import kept_choices
from fullshard.runs.prepare.prepare import Prepared, checkpoint_dir_of, prepare
from fullshard.runs.prepare.rank_identity import flat
from fullshard.runs.recipe.lr_schedule import factor
from fullshard.runs.recipe.recipe import Recipe, make_recipe
from fullshard.runs.run_directory import engine_of_run, holds_run

ORDER = ("data.sequence", "data.shuffle", "data.packing", "train.seed", "train.global_batch")  # of samples
SAMPLES = ("objective", "boundaries", "columns", "target_sequence", "mask", "image_size", "resize", "mean", "std")
CURVE = ("optim.", "schedule.", "lora.", *(f"data.{key}" for key in SAMPLES))  # by which the losses to come change
POINTS = 1000  # of a learning-rate schedule that are compared

Change = tuple[str, Any, Any]  # key, in the checkpoint, now


def refuse_other_data(manifest: Manifest, prepared: Prepared) -> None:
    """Refuse another data order: a cursor is a position in one order of samples."""
    if manifest.recipe is None or manifest.cursor is None:
        raise FullshardError("this checkpoint says nothing about its data; load it with fullshard.checkpoint.load")
    old, new = flat(manifest.recipe), flat(prepared.recipe.model_dump(mode="json"))
    for key in ORDER:
        if old.get(key) != new[key]:
            said = f"{key} = {new[key]!r}, but the checkpoint has {old.get(key)!r}"
            raise FullshardError(f"{said}: the order of samples would change; keep it, or start another run")
    data = manifest.state.get("extra", {}).get("data")
    had = data.get("identity") if isinstance(data, dict) else None  # what a program saved may mean something else
    if had is not None and had != prepared.data.identity:
        raise FullshardError(
            f"{prepared.data.path} holds other {prepared.recipe.unit} than the checkpoint was trained on; use those"
        )


def changes(manifest: Manifest, prepared: Prepared) -> list[Change]:
    """The differences from the checkpoint, in recipe or plan, that change the losses to come."""
    return [*_recipe_changes(manifest, prepared.recipe), *_plan_changes(manifest, prepared.plan)]


def _recipe_changes(manifest: Manifest, recipe: Recipe) -> Iterator[Change]:
    old, new = flat(manifest.recipe or {}), flat(recipe.model_dump(mode="json"))
    for key in new:
        if key.startswith(CURVE) and key in old and old[key] != new[key]:
            yield key, old[key], new[key]
    before = _schedule_of(manifest)
    if before is not None and before.steps != recipe.steps and not _same_rates(before, recipe, manifest.step):
        yield "train.steps", before.steps, recipe.steps


def _schedule_of(manifest: Manifest) -> Recipe | None:
    """The checkpoint's recipe, if this version of fullshard can still read it."""
    try:
        return make_recipe(manifest.recipe or {}, "the checkpoint's recipe")
    except FullshardError:
        return None


def _same_rates(old: Recipe, new: Recipe, step: int) -> bool:
    """True if two lengths of a run give the same learning rates from its last step on."""
    first, last = max(0, step - 1), max(step, min(old.steps, new.steps))
    every = max(1, (last - first) // POINTS)
    rates = ([factor(i, r.steps, **r.schedule.model_dump()) for i in range(first, last, every)] for r in (old, new))
    return next(rates) == next(rates)


def _plan_changes(manifest: Manifest, plan: Plan) -> Iterator[Change]:
    """Differences in what rounds values. A plan as data leaves out some of what has its default."""
    if manifest.plan is None:
        return
    usual = flat({"precision": asdict(Precision()), "wire": asdict(Wire())})
    old, new = usual | flat(manifest.plan), usual | flat(plan.to_dict())
    for key in usual:
        if key != "wire.memory" and old[key] != new[key]:
            yield f"the plan's {key}", old[key], new[key]


def refuse_changes(manifest: Manifest, prepared: Prepared, *, accept: bool) -> list[Change]:
    """The changes since the checkpoint. Raises unless they are accepted."""
    changed = changes(manifest, prepared)
    if changed and not accept:
        key, old, new = changed[0]
        more = f" (and {', '.join(k for k, _, _ in changed[1:])})" if changed[1:] else ""
        raise FullshardError(
            f"{key} = {json.dumps(new)} here and {json.dumps(old)} in the checkpoint{more}: the losses to come would change; "
            "keep it, or add --accept-changes"
        )
    return changed


def refuse_resume(resume: str, prepared: Prepared, directory: Path, *, accept: bool) -> None:
    """Raise, before ranks start, where a run cannot go on from its checkpoint."""
    resumed = resumed_from(prepared.recipe, directory, resume)
    if resumed is None:
        return
    place, manifest = resumed
    refuse_other_data(manifest, prepared)
    refuse_changes(manifest, prepared, accept=accept)
    if resume == "auto":
        return
    inside = str(place).startswith(f"{checkpoint_dir_of(prepared.recipe, directory)}/")
    if not inside and holds_run(directory):
        raise FullshardError(f"{directory} holds another run already; give another directory with --run")


def kept_of(recipe: Recipe, directory: Path, resume: str | None) -> dict[str, Any]:
    """What a run keeps of the checkpoint that it goes on from, where its recipe leaves it open."""
    resumed = resumed_from(recipe, directory, resume) if resume else None
    return kept_choices(resumed[1].plan) if resumed else {}


def resumed_from(recipe: Recipe, directory: Path, resume: str) -> tuple[Place, Manifest] | None:
    """The checkpoint that a run goes on from; None if `auto` finds none. If tensors of the newest are damaged, the ranks say so
    and take an older one."""
    if resume != "auto":
        place = commit.find(resume)
        return place, Checkpoint(place).manifest
    checkpoint_dir = checkpoint_dir_of(recipe, directory)
    for name in reversed(commit.committed(checkpoint_dir)):
        try:
            return checkpoint_dir.child(name), commit.read_manifest(checkpoint_dir.child(name))
        except FullshardError:  # a damaged manifest
            continue
    return None


def resumable(directory: Path, ranks: int | None) -> str:
    """What a run would resume from with this many ranks. Raises if it cannot. Starts nothing."""
    try:
        tree = parse_json(read_text(directory / "recipe.json", "recipe"))
    except FullshardError:
        raise FullshardError(f"{directory} is no run: it has no readable recipe.json") from None
    engine, recipe = load_engine(engine_of_run(directory)), make_recipe(tree, str(directory / "recipe.json"))
    checkpoint_dir = checkpoint_dir_of(recipe, directory)
    names = commit.committed(checkpoint_dir)
    whole = next((n for n in reversed(names) if not problems(checkpoint_dir.child(n))), None)
    if whole is None:
        why = problems(checkpoint_dir.child(names[-1]))[0] if names else f"{checkpoint_dir} has no checkpoint"
        raise FullshardError(f"{why}; the run would have to begin again")
    manifest = commit.read_manifest(checkpoint_dir.child(whole))
    prepared = prepare(recipe, ranks, engine, kept_choices(manifest.plan))
    refuse_other_data(manifest, prepared)
    weights = {n: t for n, t in manifest.tensors.items() if n.startswith("model.")}
    refuse_mismatch(str(checkpoint_dir.child(whole)), weights, prepared.engine.saver.weights_of(prepared.model, prepared.plan))
    left, devices = prepared.recipe.steps - manifest.step, prepared.plan.mesh.devices
    on = "1 rank" if devices == 1 else f"{devices} ranks ({prepared.plan.mesh})"
    return f"{checkpoint_dir.child(whole)} on {on}, {f'{left} steps to go' if left > 0 else 'and all its steps are done'}"
