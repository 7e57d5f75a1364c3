"""What the Run view shows of one run directory, as JSON. Reads files only; the run need not be on this machine."""

import json
import re
import time
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.reading import is_directory, is_plain_file, parse_json, read_text
from fullshard.observe.page.run_checkpoints import RunCheckpoints
from fullshard.observe.page.run_metrics import MetricsReader

SETTLED = 5.0  # seconds between two looks at checkpoints and profiles, which cost more than the metrics
SILENT = 3  # times what a rank has between two writes: it is called silent after that
SMALL = 16 << 20  # bytes of a JSON file of a run, at most
ENDS = ("stopped", "diverged", "not saved", "no improvement")  # events that end a run

Json = dict[str, Any]


class RunView:
    """A run directory. `snapshot` looks at what changed since the last time."""

    def __init__(self, directory: Path):
        refuse_no_run(directory)
        self.directory, self.name = directory, str(directory)
        self.metrics = MetricsReader(directory / "metrics.jsonl")
        self.checkpoints = RunCheckpoints(directory / "checkpoints")
        self.slow: Json = {}
        self.next_look = 0.0

    def snapshot(self) -> Json:
        """Everything that the page shows of the run."""
        self.metrics.look()
        if time.monotonic() > self.next_look:
            self._look_slowly()
        steps, ranks = self.slow["about"].get("steps"), self._ranks()
        done = int(self.metrics.rows[-1]["step"] or 0) if self.metrics.rows else 0
        return {
            "name": self.name,
            **self.slow,
            "state": self._state(done, steps, ranks),
            "done": done,
            "series": self.metrics.series(),
            "recorded": self.metrics.recorded,
            "evaluations": self.metrics.evaluations[-500:],
            "events": self.metrics.events[-20:],
            "predicted": self.metrics.last_event("predicted"),
            "ranks": ranks,
        }

    def _look_slowly(self) -> None:
        recipe = _read(self.directory / "recipe.json")
        where = str(_table(recipe, "checkpoint").get("path") or self.directory / "checkpoints").removeprefix("file://")
        remote = "://" in where  # on another machine, which the page does not ask
        about = {"steps": _table(recipe, "train").get("steps"), "model": _table(recipe, "model").get("name")}
        self.slow = {
            "about": about | {"checkpoint_url": where if remote else None},
            "checkpoints": [] if remote else self._checkpoints(Path(where)),
            "profile": last_profile(self.directory),
        }
        self.next_look = time.monotonic() + SETTLED

    def verify(self, name: str) -> Json:
        problems = self.checkpoints.verify(name)
        self.next_look = 0.0
        return problems

    def _checkpoints(self, directory: Path) -> list[Json]:
        if directory != self.checkpoints.directory:
            self.checkpoints = RunCheckpoints(directory)
        try:
            return self.checkpoints.rows()
        except (FullshardError, OSError) as error:
            return [{"name": "checkpoints", "verdict": "unknown", "why": str(error), "metrics": {}}]

    def _ranks(self) -> list[Json]:
        records = [_read(path) for path in sorted((self.directory / "ranks").glob("[0-9]*.json"))[:4096]]
        ranks = [r for r in records if isinstance(r.get("rank"), int) and isinstance(r.get("time"), int | float)]
        if not ranks:
            return []
        newest = max(ranks, key=lambda r: r["time"])
        return [r | {"health": health(r, time.time())} for r in ranks if r["rank"] < newest.get("world", 1)]

    def _state(self, done: int, steps: Any, ranks: list[Json]) -> str:
        """What the run does, in a word or two."""
        last = self.metrics.events[-1]["event"] if self.metrics.events else None
        if isinstance(steps, int) and done >= steps:
            return "complete"
        if last in ENDS and self.metrics.events[-1]["step"] == done:
            return str(last)
        if any(r["health"] == "alive" for r in ranks):
            return "running"
        return "not running" if ranks or self._quiet() else "running"

    def _quiet(self) -> bool:
        """True if nothing was written for a minute, of a run whose ranks tell nothing."""
        try:
            return time.time() - (self.directory / "metrics.jsonl").stat().st_mtime > 60
        except OSError:
            return True


def refuse_no_run(directory: Path) -> None:
    """Raise unless a directory holds a run."""
    if not is_directory(directory):
        raise FullshardError(f"{directory} is no directory; give the one that `fullshard train --run` made")
    if not any(is_plain_file(directory / name) for name in ("metrics.jsonl", "recipe.json")):
        raise FullshardError(
            f"{directory} is no run: it has neither metrics.jsonl nor recipe.json; give the directory of `fullshard train --run`"
        )


def health(rank: Json, now: float) -> str:
    """Whether a rank still tells about itself."""
    if rank.get("ended"):
        return "ended"
    every = rank.get("every")
    age = now - rank["time"]
    return "alive" if age < SILENT * (every if isinstance(every, int | float) else 5.0) + 1 else f"silent for {age:.0f} s"


def last_profile(directory: Path) -> Json | None:
    """The breakdown of the last profiled step, with its step; None if there is none."""
    profiles = [
        (int(m[1]), path) for path in (directory / "profile").glob("step-*") if (m := re.fullmatch(r"step-(\d+)", path.name))
    ]
    for step, path in sorted(profiles, reverse=True):
        if breakdown := _read(path / "breakdown.json"):
            return {"step": step, "breakdown": breakdown}
    return None


def _read(path: Path) -> Json:
    """A JSON object, or an empty one: files may be absent, or written at this moment by another version."""
    try:
        value = parse_json(read_text(path, "file", SMALL))
    except (FullshardError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _table(record: Json, key: str) -> Json:
    value = record.get(key)
    return value if isinstance(value, dict) else {}
