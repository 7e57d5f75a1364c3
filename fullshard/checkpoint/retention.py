"""The retention rules: which checkpoints kept. Pure functions over summaries of checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.checkpoint.commit import checkpoint_name
from fullshard.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep: the last `last` (0: all), every multiple of `every` steps, the `best` by `metric` (the
    lowest unless `highest`), and one per `hours`. The newest always stays."""

    last: int = 0
    every: int = 0
    best: int = 0
    metric: str | None = None
    highest: bool = False
    hours: float = 0.0


@dataclass(frozen=True)
class CheckpointSummary:
    """The fields of a manifest that retention reads."""

    step: int
    created: float
    metrics: dict[str, float]

    @classmethod
    def of(cls, manifest: Manifest) -> "CheckpointSummary":
        return cls(manifest.step, manifest.created, manifest.metrics)


def to_remove(checkpoints: Sequence[CheckpointSummary], rules: Retention) -> list[str]:
    """The names of the checkpoints that the rules do not keep, oldest first."""
    if not rules.last:
        return []
    ordered = sorted(checkpoints, key=lambda c: c.step)
    kept = {c.step for c in ordered[-max(1, rules.last) :]}
    kept |= {c.step for c in ordered if rules.every and c.step % rules.every == 0}
    kept |= {c.step for c in _best(ordered, rules)} | {c.step for c in _timed(ordered, rules.hours)}
    return [checkpoint_name(c.step) for c in ordered if c.step not in kept]


def _best(ordered: Sequence[CheckpointSummary], rules: Retention) -> list[CheckpointSummary]:
    if not rules.best or rules.metric is None:
        return []
    sign = -1 if rules.highest else 1
    known = [c for c in ordered if rules.metric in c.metrics]
    return sorted(known, key=lambda c: (sign * c.metrics[rules.metric or ""], c.step))[: rules.best]


def _timed(ordered: Sequence[CheckpointSummary], hours: float) -> list[CheckpointSummary]:
    """The first checkpoint, and each that was created at least `hours` after the previous one of these."""
    kept: list[CheckpointSummary] = []
    for c in ordered if hours else []:
        if not kept or c.created - kept[-1].created >= hours * 3600:
            kept.append(c)
    return kept
