"""A run that diverged goes back to its last good checkpoint, and skips the batches since."""

from typing import TYPE_CHECKING

from fullshard.base.errors import DIVERGED, FullshardError
from fullshard.checkpoint import commit

if TYPE_CHECKING:
    from fullshard.runs.run import Run

LOWER = "lower optim.lr, or look at the data"


class DivergedError(FullshardError):
    """A run whose weights or losses are not finite, and that cannot or shall not roll back."""

    exit_code = DIVERGED


def roll_back(run: "Run") -> None:
    """Go back to the last good checkpoint and skip the batches since. Raises if that cannot help."""
    checkpoints, source = run.checkpoints, run.source
    checkpoints.wait()  # a save in flight may turn out to be where it began
    poisoned = checkpoints.poisoned
    at = checkpoints.failed if poisoned else run.state.step
    cursor = checkpoints.cursor if poisoned else source.cursor
    count, said = run.counts.rollbacks + 1, _diverged(run, at)
    _refuse_rollback(run, said)
    place, helpless = checkpoints.last_good(), None
    if place and at <= run.counts.rolled_from and commit.read_manifest(place).step == run.counts.rolled_to:
        helpless = run.counts.rolled_to  # the run was there before, and came no further: an older one
        place = checkpoints.last_good(helpless)
    if place is None:
        earlier = "before its first checkpoint" if count == 1 else f"again after it went back to step {run.counts.rolled_to}"
        raise DivergedError(f"{said}, {earlier}; {LOWER}")
    manifest = checkpoints.roll_back(place, helpless)
    run.restore(manifest, None)
    skipped, source.cursor = cursor - source.cursor, cursor
    run.counts.rollbacks, run.counts.rolled_from, run.counts.rolled_to = count, at, manifest.step
    run.metrics.rewind(manifest.step)
    run.metrics.write(event="rolled back", step=manifest.step, diverged_at=at, skipped_samples=skipped, rollbacks=count)
    run.bar.say(f"diverged at step {at}: rolled back to step {manifest.step}, {skipped} samples are skipped")


def _refuse_rollback(run: "Run", said: str) -> None:
    wanted, last = run.recipe.train, run.checkpoints.newest_name()
    good = f"the last good checkpoint is {last}" if last else "there is no checkpoint"
    if wanted.on_divergence == "stop" or run.asked:
        raise DivergedError(f"{said}; {good}: lower optim.lr, or write train.on_divergence = 'rollback'")
    if run.counts.rollbacks >= wanted.max_rollbacks:
        raise DivergedError(f"{said}, after train.max_rollbacks = {wanted.max_rollbacks}; {good}: {LOWER}")


def _diverged(run: "Run", at: int) -> str:
    checkpoints = run.checkpoints
    why = checkpoints.why if checkpoints.poisoned else f"{run.counts.skips_in_a_row} steps in a row were not finite"
    return f"the run diverged at step {at} ({why})"
