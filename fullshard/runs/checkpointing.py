"""A run's checkpoints: when one is due, what it says besides the state, and how a run goes on from one."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fullshard import checkpoint
from fullshard.base.errors import FullshardError
from fullshard.base.status import say
from fullshard.base.text import bytes_text
from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Place
from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.other_formats.export import export
from fullshard.checkpoint.reader import Checkpoint
from fullshard.checkpoint.retention import Retention
from fullshard.checkpoint.saver import Saving
from fullshard.checkpoint.verified_load import DamagedCheckpointError, Verify
from fullshard.engine.trainer import RunState
from fullshard.plan.engine_traits import DEFAULT_ENGINE
from fullshard.runs.metrics import Metrics
from fullshard.runs.outcome import exportable
from fullshard.runs.prepare.prepare import Prepared, checkpoint_dir_of
from fullshard.runs.progress import Bar
from fullshard.runs.recipe.recipe import Recipe
from fullshard.runs.resuming import Change, refuse_changes, refuse_other_data


class Checkpoints:
    """The checkpoints of a run under way on this rank."""

    def __init__(self, prepared: Prepared, state: RunState, directory: Path, metrics: Metrics, bar: Bar, *, accept: bool = False):
        self.prepared, self.wanted, self.state = prepared, prepared.recipe.checkpoint, state
        self.recipe = prepared.recipe.model_dump(mode="json")
        self.metrics, self.bar = metrics, bar
        self.accept, self.changes = accept, list[Change]()  # of the recipe since the checkpoint, and whether they are meant
        w = self.wanted
        kept = Retention(w.keep, w.keep_every, w.best, w.metric if w.best else None, w.highest, w.keep_hours)
        checkpoint_dir = str(checkpoint_dir_of(prepared.recipe, directory))
        self.own = None if w.path else directory / "checkpoints"  # a directory that the user named stays, empty or not
        self.writer = prepared.engine.saver.checkpointer(
            checkpoint_dir, state, keep=kept, overlap=w.background, run=str(directory)
        )
        self.since, self.saved = time.monotonic(), -1  # the last one: when, and of which step
        self.saving: Saving | None = None
        self.cursor = 0  # of the save in flight, or of the one that failed last
        self.failures, self.again = 0, math.inf  # saves that failed in a row, and the step after which to try again
        self.postponed = False  # whether one fell due after a step that was not finite
        self.poisoned = self.lost = False  # what became of the last one: see `Saving`
        self.why, self.failed = "", -1  # the last one that failed: why, and of which step
        self.origin: Place | None = None  # the checkpoint of another checkpoint directory that was resumed from
        self.noted = ""  # what was said of a save; once is enough
        self.numbers: dict[str, float] = {}  # the newest evaluation, for retention

    def start(self, resume: str | None) -> Manifest | None:
        """Load what is to be resumed, if anything; refuse what cannot work before a step is lost to it."""
        if kept_apart := self.writer.tell_nodes():
            self.bar.say(kept_apart)
        manifest = self._resume(resume) if resume else None
        if not resume and self.writer.agree(bool(self.writer.names())):
            raise FullshardError(f"{self.writer.checkpoint_dir} holds checkpoints already; write --resume auto, or another --run")
        self.writer.sweep()
        self.writer.refuse_no_space(self._at_once())
        self.saved = manifest.step if manifest else -1
        return manifest

    def _at_once(self) -> int:
        """How many checkpoints will lie on the disk at the same time, at least."""
        w, steps = self.wanted, self.prepared.recipe.steps
        made = int(w.final) + (steps // w.every if w.every else 0)
        return min(made, w.keep + 1) if w.keep else made

    def _resume(self, resume: str) -> Manifest | None:
        if resume == "auto":
            return self._resume_newest()
        place = commit.find(resume)
        step = Checkpoint(place).manifest.step
        if [n for n in self.writer.names() if (commit.step_of(n) or 0) > step]:
            raise FullshardError(f"{self.writer.checkpoint_dir} has later checkpoints than {place}; resume into another --run")
        self.origin = place
        return self._load(place, "first")

    def _resume_newest(self) -> Manifest | None:
        """Load the newest whole checkpoint. It is read once: one that turns out to be damaged is loaded over."""
        say("looking for the newest whole checkpoint")
        place, damaged = self._newest(contents=False)
        while place is not None:
            try:
                manifest = self._load(place, "meanwhile")
                self.writer.verified.add(commit.checkpoint_name(manifest.step))
                return manifest
            except DamagedCheckpointError as error:
                self.bar.say(f"passed over: {error}")
                place, more = self._newest(Checkpoint(place).manifest.step, contents=False)
                damaged += [str(error), *more]
        if damaged:
            why = f"no checkpoint in {self.writer.checkpoint_dir} is whole ({damaged[0]})"
            raise FullshardError(f"{why}; bring the missing files back, or start another --run")
        self.bar.say(f"no checkpoint in {self.writer.checkpoint_dir} yet: from the beginning")
        return None

    def _newest(self, below: float = math.inf, *, contents: bool) -> tuple[Place | None, list[str]]:
        """The writer's `newest`. Reports what is passed over."""
        place, damaged = self.writer.newest(below, contents=contents)
        for sentence in damaged:
            self.bar.say(f"passed over: {sentence}")
        return place, damaged

    def _load(self, place: Place, verify: Verify) -> Manifest:
        """Load what is to be resumed, unless the recipe forbids it."""
        manifest = Checkpoint(place).manifest
        refuse_other_data(manifest, self.prepared)
        self.changes = refuse_changes(manifest, self.prepared, accept=self.accept)
        say(f"loading {place}")
        checkpoint.load(place, self.state, verify=verify)
        self.bar.say(f"resumed at step {manifest.step} from {place}")
        if manifest.state.get("engine", DEFAULT_ENGINE) != self.state.engine:
            self.bar.say("another engine saved it, whose random generators cannot be carried over: they are seeded anew")
        return manifest

    def last_good(self, below: float = math.inf) -> Place | None:
        """The newest checkpoint that is whole, of a step below `below`, or the one that the run began from."""
        place, _ = self._newest(below, contents=True)
        began = self.origin if self.origin and commit.read_manifest(self.origin).step < below else None
        return place or began

    def roll_back(self, place: Place, helpless: int | None = None) -> Manifest:
        """Load what `last_good` found. `helpless`: the step of a later checkpoint that led nowhere; it goes."""
        manifest = checkpoint.load(place, self.state, verify="first" if place is self.origin else "no")
        if helpless is not None:
            self.writer.discard(helpless)
        self.saved, self.poisoned, self.postponed, self.again = manifest.step, False, False, math.inf
        return manifest

    # -- saving ----------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether this rank's clock, or a save that failed, asks for one; the first rank's counts."""
        timed = bool(self.wanted.minutes) and time.monotonic() - self.since >= self.wanted.minutes * 60
        return timed or self.state.step + 1 >= self.again

    def troubled(self) -> bool:
        """Whether this rank knows of a save that must end the run; all have to hear of it in the same step."""
        return self.saving is not None and self.saving.done() and (self.saving.not_finite or self.saving.lease_lost)

    def after_step(self, due: bool, troubled: bool, finite: bool, cursor: int, extra: dict[str, Any]) -> None:
        """Save if it is time to, and say what became of the last one. After a step that was not `finite` nothing is saved:
        what comes of it, nobody knows yet."""
        every = self.wanted.every
        self.postponed = self.postponed or due or bool(every and self.state.step % every == 0)
        if troubled or (self.saving and self.saving.done() and not self.troubled()):
            self._report()
        if self.postponed and finite and not (self.poisoned or self.lost):
            self.save(cursor, extra)

    def save(self, cursor: int, extra: dict[str, Any], *, prune: bool = True) -> None:
        self._report()
        if self.poisoned or self.lost:
            return
        about = extra | {"data": self.prepared.data.about()}
        metrics = {k: v for k, v in self.numbers.items() if math.isfinite(v)}
        self.saving = self.writer.save(cursor=cursor, recipe=self.recipe, extra=about, metrics=metrics, prune=prune)
        if self.saving.note and self.saving.note != self.noted:
            self.noted = self.saving.note
            self.bar.say(self.noted)
        self.since, self.saved, self.cursor = time.monotonic(), self.state.step, cursor
        self.postponed, self.again = False, math.inf
        if not self.wanted.background:
            self._report()

    def _report(self, then: str = "; the run goes on, and tries again soon") -> None:
        """Wait for the save in flight; a failed one does not end the run."""
        if self.saving is None:
            return
        saving, self.saving = self.saving, None
        try:
            where = saving.result()
            self.failures = 0
            self.bar.say(f"step {saving.step}: saved {where}, {bytes_text(saving.nbytes)} in {saving.seconds:.1f} s")
        except FullshardError as error:
            self.why, self.failed = str(error), saving.step
            self.metrics.write(event="checkpoint failed", step=saving.step, why=self.why)
            self.saved, self.poisoned, self.lost = -1, saving.not_finite, saving.lease_lost
            self.again = self.state.step + min(2**self.failures, LONGEST_WAIT)
            self.failures += 1
            self.bar.say(self.why if self.poisoned or self.lost else self.why + then)
        for sentence in saving.messages:
            self.bar.say(sentence)

    def finish(self, cursor: int, extra: dict[str, Any], finite: bool, asked: Callable[[], bool]) -> None:
        """The last one, of the state as the run leaves it; raises where it cannot be saved. `asked`: whether somebody wants
        no more attempts. One after a step that was not finite makes no older one go."""
        self._report()
        until, pause, before = time.monotonic() + self.wanted.retry_seconds, 1.0, asked()
        while self.wanted.final and self.saved != self.state.step and not (self.poisoned or self.lost):
            self.save(cursor, extra, prune=finite)
            self._report("")
            if self.saved == self.state.step or self.poisoned or self.lost:
                break
            if self.writer.agree(time.monotonic() + pause > until or asked() > before):
                raise SaveFailedError(self._not_saved())
            self.bar.say(
                f"{self.writer.checkpoint_dir} is tried again in {pause:.0f} s, for {self.wanted.retry_seconds:.0f} s in all"
            )
            time.sleep(pause)
            pause = min(2 * pause, 30.0)
        self.refuse_lost()

    def refuse_lost(self) -> None:
        if self.lost:
            raise SaveFailedError(self.why)

    def wait(self) -> None:
        """Until no save is in flight, and what became of it is known."""
        self._report()

    def newest_name(self) -> str | None:
        """The newest checkpoint that this rank sees."""
        names = self.writer.names()
        return str(self.writer.checkpoint_dir.child(names[-1])) if names else None

    def _not_saved(self) -> str:
        newest = self.newest_name()
        if newest is None:
            return f"{self.why}; there is no checkpoint of this run: make room, or write checkpoint.path=OTHER, and start again"
        return f"{self.why}; make room and go on with --resume auto, or elsewhere with --resume {newest} --run OTHER"

    def close(self) -> None:
        self.writer.close()

    def release(self) -> None:
        """Let others write to the checkpoint directory, whatever has become of the other ranks. The run's own goes if nothing
        was saved there."""
        self.writer.release()
        if self.own is not None:
            with suppress(OSError):  # it holds something
                self.own.rmdir()


LONGEST_WAIT = 64  # steps between two attempts at a save that fails again and again


class SaveFailedError(FullshardError):
    """What a run has computed is not saved."""

    exit_code = 1


# -- the export at the end ----------------------------------------------------------------------------------


def export_target(recipe: Recipe, directory: Path) -> Path | None:
    """Where the end of the run is exported to, if it is."""
    wanted = recipe.checkpoint.export
    return None if wanted is False else directory / "export" if wanted is True else Path(wanted)


def refuse_export(recipe: Recipe, directory: Path) -> None:
    """Raise, before a step is trained, where the export at the end could not be made."""
    target = export_target(recipe, directory)
    if target is None:
        return
    if target.exists():
        raise FullshardError(f"checkpoint.export: {target} exists already; remove it, or write another directory")
    if not exportable(recipe):
        name = recipe.model.name
        raise FullshardError(f"checkpoint.export needs a model with a Hugging Face config, which {name} has not; leave it out")


def export_end(recipe: Recipe, directory: Path) -> Path | None:
    """The end of a run as a Hugging Face directory; adapters as PEFT's. Not collective: the first rank calls it."""
    target = export_target(recipe, directory)
    if target is None:
        return None
    newest = commit.checkpoint_name(recipe.steps)
    return export(str(checkpoint_dir_of(recipe, directory).child(newest)), target, "peft" if recipe.lora else "hf")
