"""The files of a profile, RUN/profile/step-N: traces, `breakdown.json`, `report.txt` and the picture of memory."""

import json
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.reading import parse_json, read_text
from fullshard.observe.profile.memory_picture import draw_memory
from fullshard.observe.profile.profile_report import recommendation_text, report
from fullshard.observe.profile.profile_summary import VERSION, summarize
from fullshard.observe.profile.recommend import PlannedStep, predicted_lanes, recommend
from fullshard.observe.profile.trace_file import AGAIN, read_traces, trace_files
from fullshard.ranks.local_ranks import ranks_here
from fullshard.runs.prepare.prepare import Prepared
from fullshard.runs.prepare.recipe_plan import make_optimizer

BREAKDOWN, REPORT = "breakdown.json", "report.txt"
MOST_BYTES = 1 << 26  # of a breakdown


def write_profile(prepared: Prepared, directory: Path) -> str:
    """Read the traces of a profile and write its other files. Returns the end of a sentence about it."""
    profile = complete(summarize(read_traces(trace_files(directory))), planned(prepared))
    _write(directory / BREAKDOWN, json.dumps(profile, indent=1) + "\n")
    text = report(profile)
    note = draw_memory(profile, directory)
    _write(directory / REPORT, text + (f"\n{note}\n" if note else ""))
    return f"{directory / REPORT}; {recommendation_text(profile)}"


def planned(prepared: Prepared) -> PlannedStep:
    """What the planner knows of a run."""
    recipe, wanted = prepared.recipe, prepared.recipe.data
    workers = prepared.data.workers(ranks_here()) if wanted.workers is None else wanted.workers
    return PlannedStep(
        plan=prepared.plan,
        description=prepared.description,
        cluster=prepared.cluster,
        estimate=prepared.estimate,
        loss="chunked" if recipe.loss == "chunked" else "plain",
        optimizer=make_optimizer(recipe),
        clip=recipe.optim.clip is not None,
        loaders=workers or min(wanted.prefetch, 1),  # without workers, a thread loads ahead
    )


def complete(profile: dict[str, Any], step: PlannedStep | None) -> dict[str, Any]:
    """A summary with what the planner predicts and recommends."""
    if step is not None and (estimate := step.estimate) is not None:
        profile["predicted"] = predicted_lanes(estimate)
        if profile["memory"]:
            profile["memory"]["estimated_bytes"] = estimate.device.allocated_bytes
            profile["memory"]["estimated_kinds"] = dict(sorted(estimate.device.terms.items(), key=lambda item: -item[1]))
    profile["recommendation"] = recommend(profile, step)
    return profile


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.partial")
    fresh.write_text(text)
    fresh.replace(path)


def last_profile(directory: Path) -> Path:
    """The newest profile of a run, or the directory itself if it is a profile."""
    if not directory.is_dir():
        raise FullshardError(f"{directory} is no directory; name a run, or a recipe to profile")
    if (directory / BREAKDOWN).is_file() or list(directory.glob("rank-*.trace.json.gz")):
        return directory
    if not (directory / "plan.json").is_file():
        raise FullshardError(f"{directory} is no run: it has no plan.json; name a directory that `fullshard train --run` made")
    profiles = [p for p in (directory / "profile").glob("step-*") if p.name.removeprefix("step-").isdecimal()]
    if not profiles:
        raise FullshardError(
            f"{directory} has no profile; write profile.at = 100 in its recipe, or `fullshard profile RECIPE` for a new run"
        )
    return max(profiles, key=lambda p: p.stat().st_mtime_ns)


def read_profile(directory: Path, *, traces: bool = False) -> dict[str, Any]:
    """The breakdown of a profile, from its file; with `traces`, computed again from its traces."""
    path = directory / BREAKDOWN
    if not traces and not path.is_file():
        raise FullshardError(
            f"{directory} has no {BREAKDOWN}, as a run that was killed leaves it; add --traces to read its traces"
        )
    profile = parse_json(read_text(path, "breakdown", MOST_BYTES), str(path)) if path.is_file() else {}
    if path.is_file() and (not isinstance(profile, dict) or profile.get("version") != VERSION):
        raise FullshardError(f"{path} is no breakdown of version {VERSION}; {AGAIN}")
    if not traces:
        return profile
    again = summarize(read_traces(trace_files(directory)))
    for key in ("predicted", "recommendation"):
        again[key] = profile.get(key)
    return again


def profile_text(directory: Path, *, traces: bool = False) -> tuple[str, dict[str, Any]]:
    """The report of a profile and its breakdown."""
    profile = read_profile(directory, traces=traces)
    try:
        return report(profile), profile
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise FullshardError(f"{directory / BREAKDOWN} is damaged ({type(error).__name__}: {error}); add --traces") from None
