"""The directory of a run, and what is refused before one is written to.

RUN/recipe.json     the resolved recipe
RUN/plan.json       the plan
RUN/classes.json    the names of the classes by number, if the data names them
RUN/metrics.jsonl   a line a step, an evaluation and an event
RUN/samples.jsonl   what the model wrote, if it was asked to
RUN/wandb-id        which run of Weights & Biases this is, if it is one
RUN/checkpoints/    see docs/guides/checkpoints.md
RUN/hang/           the stacks of each rank, if the run was ended because it hung
"""

import json
import os
from pathlib import Path

from fullshard.errors import FullshardError
from fullshard.reading import is_directory, is_plain_file
from fullshard.runs.prepare import Prepared


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
    if (directory / "metrics.jsonl").exists():
        raise FullshardError(f"{directory} holds a run already; go on with --resume auto, or give another --run")


def write_run(directory: Path, prepared: Prepared) -> None:
    texts = {"recipe.json": prepared.recipe.model_dump_json(indent=1) + "\n", "plan.json": prepared.plan.to_json()}
    if classes := prepared.data.about().get("classes"):
        texts["classes.json"] = json.dumps(classes, indent=1, ensure_ascii=False) + "\n"
    for name, text in texts.items():
        fresh = directory / f".{name}.partial"
        fresh.write_text(text)
        fresh.replace(directory / name)  # a kill leaves the old one or the new one
