"""Reads a run's metrics.jsonl as it grows, and thins it out for a chart."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.base.errors import is_number

COLUMNS = (
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "samples_per_second",
    "mfu",
    "seconds",
    "data_wait_seconds",
    "memory_allocated",
    "memory_reserved",
)
MOST_ROWS = 1200  # that a chart is drawn of
MOST_KEPT = 40_000  # in memory: of a longer run, the rows are thinned out to half as many
MOST_READ = 16 << 20  # bytes of one look: a long file takes several
MOST_EVENTS = 200

Row = dict[str, float | None]
Columns = dict[str, list[float | None]]


@dataclass
class MetricsReader:
    """The numbers of one file so far. `version` changes when they do."""

    path: Path
    rows: list[Row] = field(default_factory=list)  # a step each; of a long run, not all
    recorded: int = 0  # steps in the file
    evaluations: list[Row] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    offset: int = 0
    file: int = -1  # its inode: a resumed run replaces the file
    version: int = 0
    drawn: tuple[int, Columns] = (-1, {})  # the last answer of `series`, and its version

    def look(self) -> None:
        """Read what was appended since the last look. A file that was cut back or replaced is read again from its start."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.file or status.st_size < self.offset:
                    self._begin(status.st_ino)
                file.seek(self.offset)
                data = file.read(MOST_READ)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]  # the last line may still be written
        self.offset += len(whole)
        for line in whole.splitlines():
            self._take(line)
        if len(self.rows) > MOST_KEPT:
            self.rows = thinned(self.rows, MOST_KEPT // 2)

    def _begin(self, inode: int) -> None:
        self.rows, self.evaluations, self.events = [], [], []
        self.offset, self.file, self.recorded = 0, inode, 0
        self.version += 1

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return  # a line that a kill cut off
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            return
        self.version += 1
        if "event" in record:
            self.events = [*self.events, record][-MOST_EVENTS:]
        elif "loss" in record:
            self.recorded += 1
            self.rows.append({"step": record["step"], **{name: _number(record.get(name)) for name in COLUMNS}})
        elif (loss := _number(record.get("eval_loss"))) is not None:
            self.evaluations.append({"step": record["step"], "loss": loss})

    def series(self) -> Columns:
        """The columns that have numbers, thinned out; with `step`."""
        if self.drawn[0] != self.version:
            rows = thinned(self.rows, MOST_ROWS)
            names = [name for name in COLUMNS if any(row[name] is not None for row in rows)]
            self.drawn = self.version, {name: [row[name] for row in rows] for name in ("step", *names)}
        return self.drawn[1]

    def last_event(self, name: str) -> dict[str, Any] | None:
        return next((event for event in reversed(self.events) if event["event"] == name), None)


def thinned(rows: list[Row], most: int) -> list[Row]:
    """At most `most` rows: of each stretch of steps those with the lowest and the highest loss, so that no spike is lost."""
    if len(rows) <= most:
        return rows
    first, last = (int(rows[i]["step"] or 0) for i in (0, -1))
    stretches: dict[int, list[int]] = {}  # by number, the places of the rows with the lowest and the highest loss
    for n, row in enumerate(rows):
        stretch = (int(row["step"] or 0) - first) * (most // 2 - 2) // max(1, last - first)
        low, high = stretches.setdefault(stretch, [n, n])
        stretches[stretch] = [n if _loss(row) < _loss(rows[low]) else low, n if _loss(row) > _loss(rows[high]) else high]
    return [rows[n] for n in sorted({0, len(rows) - 1, *(n for pair in stretches.values() for n in pair)})]


def _loss(row: Row) -> float:
    loss = row["loss"]
    return float("inf") if loss is None else loss  # not finite: worth to be seen


def _number(value: Any) -> float | None:
    return value if is_number(value) else None
