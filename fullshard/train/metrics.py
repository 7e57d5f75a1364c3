"""A run's numbers: one JSON object a line, readable while the run goes on, and the same to TensorBoard and
Weights & Biases where asked. Written by the first rank; on the others nothing happens."""

import json
import secrets
from pathlib import Path
from typing import Any, Protocol, TextIO

from fullshard.errors import FullshardError
from fullshard.train.recipe import Recipe


class Sink(Protocol):
    """Another place for numbers."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Appends to RUN/metrics.jsonl. Numbers that are not finite become null: JSON has no word for them."""

    def __init__(self, directory: Path | None, sinks: list[Sink] | None = None):
        self.directory, self.sinks = directory, sinks or []
        self.file: TextIO | None = (directory / "metrics.jsonl").open("a") if directory else None

    def write(self, **record: Any) -> None:
        if self.file is None:
            return
        clean = {k: v for k, v in record.items() if not isinstance(v, float) or v - v == 0}
        self.file.write(json.dumps({k: clean.get(k) for k in record}) + "\n")
        self.file.flush()
        numbers = {k: v for k, v in clean.items() if k != "step" and isinstance(v, int | float)}
        for sink in self.sinks if numbers else []:
            sink.write(record["step"], numbers)

    def write_sample(self, **record: Any) -> None:
        if self.directory:
            with (self.directory / "samples.jsonl").open("a") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        if self.file:
            self.file.close()


def rewind(directory: Path, step: int) -> float | None:
    """Drop what a run wrote after `step`, and lines that a kill cut off; the loss it had at the step after."""
    then: float | None = None
    for path in (directory / "metrics.jsonl", directory / "samples.jsonl"):
        if not path.exists():
            continue
        lines = [(line, _record(line)) for line in path.read_text(errors="replace").splitlines()]
        following = [r["loss"] for _, r in lines if r.get("step") == step + 1 and r.get("loss") is not None]
        then = following[-1] if following else then
        kept = [line for line, r in lines if isinstance(r.get("step"), int) and r["step"] <= step]
        fresh = path.with_name(f".{path.name}.partial")
        fresh.write_text("".join(f"{line}\n" for line in kept))
        fresh.replace(path)
    return then


def _record(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def open_metrics(directory: Path | None, recipe: Recipe, step: int = 0) -> Metrics:
    """`directory` is None on all ranks but the first. `step`: the one that the run is at."""
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
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

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

    def close(self) -> None:
        self.run.finish()


def _own_id(path: Path) -> str:
    if not path.exists():
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()
