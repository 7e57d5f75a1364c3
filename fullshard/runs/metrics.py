"""The numbers of a run: one JSON object a line, readable while it runs, and optionally TensorBoard and Weights & Biases.

The first rank writes; on the others nothing happens.
"""

import json
import os
import secrets
import sys
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fullshard.base.errors import FullshardError
from fullshard.base.reading import is_plain_file
from fullshard.runs.json_lines import Lines
from fullshard.runs.recipe.recipe import Recipe


class Sink(Protocol):
    """Another place for numbers."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """The run goes back to `step`."""

    def close(self) -> None: ...


class Metrics:
    """Appends to RUN/metrics.jsonl. Numbers that are not finite become null. What cannot be written is counted and reported; the
    run goes on.
    """

    def __init__(self, directory: Path | None, sinks: list[Sink] | None = None):
        self.directory, self.sinks = directory, sinks or []
        self.say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        self.failures: Counter[str] = Counter()  # of each sink
        self.lines = Lines(directory / "metrics.jsonl") if directory else None
        self.samples = Lines(directory / "samples.jsonl") if directory else None
        if self.lines:
            self.lines.open()

    def write(self, **record: Any) -> None:
        if self.lines is None:
            return
        clean = {k: v for k, v in record.items() if not isinstance(v, float) or v - v == 0}
        self._append(self.lines, {k: clean.get(k) for k in record})
        numbers = {k: v for k, v in clean.items() if k != "step" and isinstance(v, int | float)}
        for sink in self.sinks if numbers else []:
            self._try(sink, partial(sink.write, record["step"], numbers))

    def write_sample(self, **record: Any) -> None:
        if self.samples:
            self._append(self.samples, record)

    def _append(self, lines: Lines, record: dict[str, Any]) -> None:
        before, lost = len(lines.waiting), lines.lost
        lines.append(record)
        if lines.waiting and not before:
            self.say(f"cannot write to {lines.path}: {lines.error}; the run goes on, and its lines wait for room")
        if before and not lines.waiting:
            self.say(f"{lines.path} is written again" + (f"; {lost} lines were lost" if lost else ", with the lines that waited"))

    def _try(self, sink: Sink, call: Callable[[], None]) -> None:
        """Call a sink. The run goes on without one that fails, and says so once."""
        name = type(sink).__name__
        try:
            call()
        except Exception as error:
            if not self.failures[name]:
                self.say(f"{name} failed ({type(error).__name__}: {error}); the run goes on without it")
            self.failures[name] += 1

    def rewind(self, step: int) -> None:
        """Forget what was written after `step`: the run goes on from there."""
        for lines in (self.lines, self.samples):
            if lines:
                lines.close()
                lines.waiting = deque(w for w in lines.waiting if _record(w.decode()).get("step", step) <= step)
        if self.directory:
            rewind(self.directory, step)
        for sink in self.sinks:
            self._try(sink, partial(sink.rewind, step))

    def close(self) -> None:
        for sink in self.sinks:
            self._try(sink, sink.close)
        for name, count in self.failures.items():
            self.say(f"{name} failed {count} times: it lacks numbers")
        for lines in (self.lines, self.samples):
            if lines:
                lines.close()
                if lines.unwritten:
                    self.say(f"{lines.unwritten} lines of {lines.path} were not written: {lines.error}")


def rewind(directory: Path, step: int) -> float | None:
    """Drop what a run wrote after `step`, and lines that a kill cut off; the loss it had at the step after."""
    then: float | None = None
    for path in (directory / "metrics.jsonl", directory / "samples.jsonl"):
        if not is_plain_file(path):  # reading a pipe would wait for its writer
            continue
        lines = [(line, _record(line)) for line in _split(path)]
        following = [r["loss"] for _, r in lines if r.get("step") == step + 1 and r.get("loss") is not None]
        then = following[-1] if following else then
        kept = [line for line, r in lines if isinstance(r.get("step"), int) and r["step"] <= step]
        if len(kept) < len(lines):
            _replace(path, kept)
    return then


def _replace(path: Path, kept: list[str]) -> None:
    """Rewrite the file with these lines. On a full disk, truncate it after those that it begins with."""
    fresh = path.with_name(f".{path.name}.partial")
    try:
        fresh.write_text("".join(f"{line}\n" for line in kept))
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        lines = _split(path)
        same = next((i for i, (a, b) in enumerate(zip(lines, kept, strict=False)) if a != b), min(len(lines), len(kept)))
        os.truncate(path, sum(len(line.encode()) + 1 for line in lines[:same]))


def _split(path: Path) -> list[str]:
    """Split at line ends only: a text may hold other separators."""
    return path.read_bytes().decode(errors="replace").removesuffix("\n").split("\n")


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def open_metrics(directory: Path | None, recipe: Recipe, step: int = 0) -> Metrics:
    """Open the run's metrics at `step`. `directory` is None on all ranks but the first."""
    if directory is None:
        return Metrics(None)
    sinks: list[Sink] = [TensorBoard(directory, step)] if recipe.log.tensorboard else []
    if recipe.log.wandb:
        sinks.append(WeightsAndBiases(directory, recipe))
    return Metrics(directory, sinks)


def refuse_sinks(recipe: Recipe) -> None:
    """Raise where a package that the recipe's log needs is missing."""
    from importlib.util import find_spec

    for wanted, package in ((recipe.log.tensorboard, "tensorboard"), (recipe.log.wandb, "wandb")):
        if wanted and find_spec(package) is None:
            raise FullshardError(f"log.{package} needs {package}: pip install {package}, or leave it out")


class TensorBoard:
    """RUN/tensorboard: what `tensorboard --logdir` shows."""

    def __init__(self, directory: Path, step: int):
        self.directory = directory
        self._open(step)

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.directory / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        self.writer.close()
        self._open(step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of a Weights & Biases project, named after the run's directory; WANDB_MODE=offline keeps it local.

    RUN/wandb-id names it, so that a resumed run goes on in the same one. What that has already, it does not take twice.
    """

    def __init__(self, directory: Path, recipe: Recipe):
        import wandb

        self.run = wandb.init(
            project=recipe.log.wandb,
            id=_own_id(directory / "wandb-id"),
            resume="allow",
            name=directory.name,
            dir=str(directory),
            config=recipe.model_dump(),
            allow_val_change=True,  # a resumed run may have other ranks, or more steps
        )
        self.first = self.run.step  # of a resumed run: the first that it lacks

    def write(self, step: int, numbers: dict[str, float]) -> None:
        if step >= self.first:
            self.run.log(numbers, step=step)

    def rewind(self, step: int) -> None:
        self.first = self.run.step

    def close(self) -> None:
        self.run.finish()


def _own_id(path: Path) -> str:
    if not path.exists():
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()
