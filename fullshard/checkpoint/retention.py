"""Which checkpoints stay. A pure function: names in, names out."""

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.checkpoint.commit import checkpoint_name
from fullshard.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Kept:
    """What to keep: the last `last` (0: all), those whose step is a multiple of `every`, the `best` ones by `metric`
    (lower is better unless `highest`), and one for each `hours`. The newest always stays."""

    last: int = 0
    every: int = 0
    best: int = 0
    metric: str | None = None
    highest: bool = False
    hours: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """What retention has to know of a checkpoint."""

    step: int
    created: float
    metrics: dict[str, float]

    @classmethod
    def of(cls, manifest: Manifest) -> "Candidate":
        return cls(manifest.step, manifest.created, manifest.metrics)


def to_remove(found: Sequence[Candidate], rules: Kept) -> list[str]:
    """The names of those that may go, oldest first."""
    if not rules.last:
        return []
    ordered = sorted(found, key=lambda c: c.step)
    stay = {c.step for c in ordered[-max(1, rules.last) :]}
    stay |= {c.step for c in ordered if rules.every and c.step % rules.every == 0}
    stay |= {c.step for c in _best(ordered, rules)} | {c.step for c in _timed(ordered, rules.hours)}
    return [checkpoint_name(c.step) for c in ordered if c.step not in stay]


def _best(ordered: Sequence[Candidate], rules: Kept) -> list[Candidate]:
    if not rules.best or rules.metric is None:
        return []
    sign = -1 if rules.highest else 1
    known = [c for c in ordered if rules.metric in c.metrics]
    return sorted(known, key=lambda c: (sign * c.metrics[rules.metric or ""], c.step))[: rules.best]


def _timed(ordered: Sequence[Candidate], hours: float) -> list[Candidate]:
    """The first of each stretch of `hours`, counted from the last one that was kept."""
    kept: list[Candidate] = []
    for c in ordered if hours else []:
        if not kept or c.created - kept[-1].created >= hours * 3600:
            kept.append(c)
    return kept
