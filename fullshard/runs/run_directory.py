"""The directory of a run, and what is refused before one is written to.

RUN/recipe.json     the resolved recipe
RUN/plan.json       the plan, and who made each choice
RUN/run.json        the engine, the number of devices and the versions
RUN/classes.json    the names of the classes by number, if the data names them
RUN/metrics.jsonl   a line a step, an evaluation and an event
RUN/samples.jsonl   what the model wrote, if it was asked to
RUN/wandb-id        which run of Weights & Biases this is, if it is one
RUN/ranks/          what each rank does, replaced every few seconds
RUN/checkpoints/    see docs/guides/checkpoints.md
RUN/hang/           the stacks of each rank, if the run was ended because it hung
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from fullshard.base.errors import FullshardError
from fullshard.base.reading import is_directory, is_plain_file, parse_json, read_text
from fullshard.plan.engine_traits import DEFAULT_ENGINE
from fullshard.runs.prepare.prepare import Prepared
from fullshard.runs.prepare.rank_identity import versions_of

EARLY = ("kernels", "recipe changed")  # events that are written before the first step


def refuse_path(directory: Path) -> None:
    """Raise, before ranks start, where a run's directory cannot be made or written to."""
    there = next((p for p in (directory, *directory.absolute().parents) if is_directory(p) or is_plain_file(p)), directory)
    if not is_directory(there):
        raise FullshardError(f"--run {directory}: {there} is no directory; give another --run")
    if not os.access(there, os.W_OK | os.X_OK):
        raise FullshardError(f"--run {directory}: {there} may not be written to; give another --run")
    if len(os.fsencode(directory.name)) > 255 or "\0" in str(directory):
        raise FullshardError(f"--run {str(directory)!r} is no name of a directory; give another --run")


def refuse_run(directory: Path) -> None:
    """A run's directory is made once; two runs in one would mix their numbers."""
    if holds_run(directory):
        raise FullshardError(f"{directory} holds a run already; go on with --resume auto, or give another --run")


def holds_run(directory: Path) -> bool:
    """True if a run came to its first step there: an attempt that failed before may be made again."""
    path = directory / "metrics.jsonl"
    return is_plain_file(path) and any(line.strip() and not _before_first_step(line) for line in path.open("rb"))


def _before_first_step(line: bytes) -> bool:
    try:
        event = json.loads(line)
    except ValueError:
        return False
    return isinstance(event, dict) and event.get("event") in EARLY


def engine_of_run(directory: Path) -> str:
    """The engine that a run was last trained with."""
    path = directory / "run.json"
    found = parse_json(read_text(path, "run"), str(path)) if is_plain_file(path) else {}
    return str(found.get("engine", DEFAULT_ENGINE)) if isinstance(found, dict) else DEFAULT_ENGINE


def _plan_text(prepared: Prepared) -> str:
    """What `plan.json` holds: the plan, and who made each choice of it."""
    choices = {key: asdict(choice) for key, choice in prepared.choices.items()}
    return json.dumps(prepared.plan.to_dict() | {"choices": choices}, indent=1) + "\n"


def write_run(directory: Path, prepared: Prepared) -> None:
    engine = prepared.engine
    about = {"engine": engine.name, "devices": prepared.plan.mesh.devices, "versions": versions_of(engine.ranks)}
    texts = {"recipe.json": prepared.recipe.model_dump_json(indent=1) + "\n", "plan.json": _plan_text(prepared)}
    texts["run.json"] = json.dumps(about, indent=1) + "\n"
    if classes := prepared.data.about().get("classes"):
        texts["classes.json"] = json.dumps(classes, indent=1, ensure_ascii=False) + "\n"
    for name, text in texts.items():
        fresh = directory / f".{name}.partial"
        fresh.write_text(text)
        fresh.replace(directory / name)  # a kill leaves the old one or the new one
