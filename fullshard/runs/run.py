"""One run, carried out on all ranks, and its directory.

RUN/recipe.json     the resolved recipe
RUN/plan.json       the plan
RUN/metrics.jsonl   a line a step, an evaluation and an event
RUN/samples.jsonl   what the model wrote, if it was asked to
RUN/wandb-id        which run of Weights & Biases this is, if it is one
RUN/checkpoints/    see docs/checkpoints.md
RUN/hang/           the stacks of each rank, if the run was ended because it hung
"""

import math
import os
import signal
import sys
import time
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fullshard.checkpoint import commit
from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.place import Local
from fullshard.data import Batches
from fullshard.errors import DIVERGED, FullshardError
from fullshard.reading import is_directory, is_plain_file
from fullshard.runs.checkpointing import Checkpoints, SaveFailedError, export_end, refuse_export
from fullshard.runs.disk_check import judge_disk
from fullshard.runs.metrics import Metrics, open_metrics, rewind
from fullshard.runs.prepare import Prepared, batches, disk_of, make_optimizer, shelf_of
from fullshard.runs.progress import Bar
from fullshard.runs.lr_schedule import factor
from fullshard.runs.prediction_check import ThisHost, Verdict, explain_out_of_memory
from fullshard.runs.watchdog import Watchdog

if TYPE_CHECKING:
    from fullshard.on_torch import State


LOWER = "lower optim.lr, or look at the data"


class DivergedError(FullshardError):
    """A run whose weights or losses are not finite, and that cannot or shall not roll back."""

    exit_code = DIVERGED


def execute(prepared: Prepared, directory: Path, resume: str | None = None, *, accept: bool = False) -> None:
    """Train. Collective: every rank calls it. `resume`: `auto`, or a checkpoint. `accept`: the recipe may change how
    training goes on from it."""
    from fullshard import on_torch

    on_torch.start()
    with ExitStack() as held:
        on_torch.first_decides(lambda: _take(directory, prepared, held))
        ended = _execute(prepared, directory, resume, accept)
        if ended and on_torch.is_first():
            export_end(prepared.recipe, directory)


def _take(directory: Path, prepared: Prepared, held: ExitStack) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    held.enter_context(commit.hold_run(directory))
    commit.sweep_run(Local(directory))
    refuse_export(prepared.recipe, directory)


def _execute(prepared: Prepared, directory: Path, resume: str | None, accept: bool) -> bool:
    """Whether the run came to its end, and did not stop before."""
    from fullshard import on_torch

    recipe, first = prepared.recipe, on_torch.is_first()
    # What a checkpoint will overwrite need not be read from elsewhere first.
    weights = None if resume and (resume != "auto" or commit.committed(shelf_of(recipe, directory))) else prepared.weights
    disk = disk_of(recipe, prepared.plan)
    for line in judge_disk(prepared, disk) if disk else ():
        if first:
            print(line, file=sys.stderr, flush=True)
    state = on_torch.shard(
        prepared.model, prepared.plan, make_optimizer(recipe), seed=recipe.train.seed, weights=weights, disk=disk
    )
    metrics = open_metrics(None, recipe)
    watched = Watchdog(on_torch.HangReporter(), recipe.train.hang_seconds, directory / "hang", compiles=prepared.plan.compile)
    with Bar(recipe.steps, visible=first) as bar, Signals() as signals, watched as watchdog:
        checkpoints = Checkpoints(prepared, state, directory, metrics, bar, accept=accept)
        try:
            found = checkpoints.start(resume)
            opened: list[tuple[Metrics, float | None]] = []  # not before: a recipe that is refused must not replace the run's own
            on_torch.first_decides(lambda: opened.append(_open_run(directory, prepared, state.step)))
            metrics, expected = opened[0] if first else (metrics, None)
            metrics.say, checkpoints.metrics = bar.say, metrics
            run = Run(prepared, state, metrics, bar, signals, checkpoints, watchdog)
            run.restore(found, expected)
            run.tell_changes()
            run.tell_kernels()
            failure = _train_on(run)
            ended = state.step == recipe.steps
            checkpoints.close()  # not when something was raised: a save in flight may wait for a rank that is gone
        finally:
            metrics.close()
            checkpoints.release()
    if failure:
        raise failure
    return ended


def _open_run(directory: Path, prepared: Prepared, step: int) -> tuple[Metrics, float | None]:
    """The run's files, and the loss that the run had before at the step after."""
    try:
        write_run(directory, prepared)
        expected = rewind(directory, step)
        return open_metrics(directory, prepared.recipe, step), expected
    except OSError as error:
        raise FullshardError(
            f"cannot write to {directory}: {error.strerror or error}; make room, or give another --run"
        ) from None


def _train_on(run: "Run") -> FullshardError | None:
    """To the end, or until something ends it; what went wrong, if anything. All ranks return the same."""
    try:
        while (why := _train_until(run)) == "diverged":
            with run.watchdog.saving():
                run.roll_back()
    except (DivergedError, SaveFailedError) as error:
        why = "diverged" if isinstance(error, DivergedError) else "not saved"
        run.metrics.write(event=why, step=run.state.step)
        return error
    return None


def _train_until(run: "Run") -> str | None:
    """Why the run ends where it does, if it is before its last step."""
    why = None
    while why is None and run.state.step < run.recipe.steps:
        run.step(run.state.step)
        why = run.why_stop()
    if why and why != "diverged":
        run.metrics.write(event=why, step=run.state.step)
        run.bar.say(f"ended after step {run.state.step}: {why}")
    if why != "diverged":
        with run.watchdog.saving():
            run.checkpoints.finish(run.source.cursor, run.numbers(), not run.skips_in_a_row, lambda: run.signals.asked)
    return "diverged" if run.checkpoints.poisoned else why


class Run:
    """A run under way on this rank."""

    def __init__(
        self,
        prepared: Prepared,
        state: "State",
        metrics: Metrics,
        bar: Bar,
        signals: "Signals",
        checkpoints: Checkpoints,
        watchdog: Watchdog,
    ):
        from fullshard import on_torch

        self.prepared, self.recipe, self.state = prepared, prepared.recipe, state
        self.metrics, self.bar, self.signals, self.checkpoints, self.watchdog = metrics, bar, signals, checkpoints, watchdog
        self.source = batches(self.recipe, state.plan, prepared.data, on_torch.data_rank(state.plan.mesh))
        self.loss = on_torch.chunked_loss if self.recipe.train.loss == "chunked" else on_torch.summed_loss
        self.flops = on_torch.flops_per_token(state.model, self.recipe.data.sequence)
        self.peak = on_torch.peak_flops(state)
        host = ThisHost(prepared, state.device, between=not state.tiers)
        self.verdict = Verdict(prepared.estimate, host) if prepared.estimate else None
        self.asked = False  # by a signal, on any rank
        self.skips = self.skips_in_a_row = 0
        self.best, self.since_best = float("inf"), 0
        self.rollbacks, self.rolled_from, self.rolled_to = 0, -1, -1  # how many, and the steps of the last
        self.expected: float | None = None  # the loss that the first resumed step had before

    def numbers(self) -> dict[str, Any]:
        """What a resumed run has to know besides the state and the cursor."""
        best = self.best if self.best < float("inf") else None
        counts = {"skips": self.skips, "skips_in_a_row": self.skips_in_a_row, "best": best, "since_best": self.since_best}
        return counts | {"rollbacks": self.rollbacks, "rolled_from": self.rolled_from, "rolled_to": self.rolled_to}

    def restore(self, found: Manifest | None, expected: float | None) -> None:
        """Go on where a checkpoint was made."""
        if found is not None:
            self.skips, self.skips_in_a_row = _told(found, "skips", 0), _told(found, "skips_in_a_row", 0)
            self.best, self.since_best = _told(found, "best", float("inf")), _told(found, "since_best", 0)
            self.rollbacks = _told(found, "rollbacks", 0)
            self.rolled_from, self.rolled_to = _told(found, "rolled_from", -1), _told(found, "rolled_to", -1)
            self.expected = expected
            assert found.cursor is not None
            self.source.cursor = found.cursor
        self.steps = iter(self.source)

    def tell_changes(self) -> None:
        """What of the recipe is other than in the checkpoint, and was accepted."""
        for key, old, new in self.checkpoints.changes:
            self.metrics.write(event="recipe changed", step=self.state.step, key=key, old=old, new=new)
            self.bar.say(f"changed since the checkpoint: {key} {old} → {new}")

    def tell_kernels(self) -> None:
        """Which kernels update state that rests away from the device; aloud where something is missing."""
        found = self.state.kernels
        if found:
            self.metrics.write(event="kernels", step=self.state.step, **found)
        for lane, text in found.items():
            if text.startswith("torch: "):
                self.bar.say(f"{lane.partition('_')[0].upper()} updates run on torch's slower kernels: {text.partition(': ')[2]}")

    def roll_back(self) -> None:
        """Go back to the last checkpoint and on behind the batches that led here; raises where that is of no use."""
        self.checkpoints.wait()  # a save in flight may turn out to be where it began
        poisoned = self.checkpoints.poisoned
        at = self.checkpoints.failed if poisoned else self.state.step
        cursor = self.checkpoints.cursor if poisoned else self.source.cursor
        count, said = self.rollbacks + 1, self._diverged(at)
        self._refuse_rollback(said)
        place, helpless = self.checkpoints.last_good(), None
        if place and at <= self.rolled_from and commit.read_manifest(place).step == self.rolled_to:
            helpless = self.rolled_to  # the run was there before, and came no further: an older one
            place = self.checkpoints.last_good(helpless)
        if place is None:
            earlier = "before its first checkpoint" if count == 1 else f"again after it went back to step {self.rolled_to}"
            raise DivergedError(f"{said}, {earlier}; {LOWER}")
        found = self.checkpoints.roll_back(place, helpless)
        self.restore(found, None)
        skipped, self.source.cursor = cursor - self.source.cursor, cursor
        self.rollbacks, self.rolled_from, self.rolled_to = count, at, found.step
        self.metrics.rewind(found.step)
        self.metrics.write(event="rolled back", step=found.step, diverged_at=at, skipped_samples=skipped, rollbacks=count)
        self.bar.say(f"diverged at step {at}: rolled back to step {found.step}, {skipped} samples are skipped")

    def _refuse_rollback(self, said: str) -> None:
        wanted, last = self.recipe.train, self.checkpoints.newest_name()
        good = f"the last good checkpoint is {last}" if last else "there is no checkpoint"
        if wanted.on_divergence == "stop" or self.asked:
            raise DivergedError(f"{said}; {good}: lower optim.lr, or write train.on_divergence = 'rollback'")
        if self.rollbacks >= wanted.max_rollbacks:
            raise DivergedError(f"{said}, after train.max_rollbacks = {wanted.max_rollbacks}; {good}: {LOWER}")

    def _diverged(self, at: int) -> str:
        why = self.checkpoints.why if self.checkpoints.poisoned else f"{self.skips_in_a_row} steps in a row were not finite"
        return f"the run diverged at step {at} ({why})"

    def step(self, index: int) -> None:
        """One step, its numbers, and what falls due after it."""
        start = time.perf_counter()
        self.watchdog.begin(index + 1)
        micro_batches = next(self.steps)
        waited = time.perf_counter() - start
        lr = self.recipe.optim.lr * factor(index, self.recipe.steps, **self.recipe.schedule.model_dump())
        self._train(micro_batches, index, lr, start, waited)
        self.watchdog.end(time.perf_counter() - start)
        if (every := self.recipe.eval.every) and (index + 1) % every == 0:
            self.evaluate(index + 1)
        if (every := self.recipe.sample.every) and (index + 1) % every == 0:
            self.sample(index + 1)
        with self.watchdog.saving():
            self.checkpoints.after_step(self.due, self.troubled, not self.skips_in_a_row, self.source.cursor, self.numbers())
        self.checkpoints.refuse_lost()

    def _train(self, micro_batches: Any, index: int, lr: float, start: float, waited: float) -> None:
        from fullshard import on_torch

        try:
            result = on_torch.train_step(
                self.state,
                micro_batches,
                loss=self.loss,
                clip=self.recipe.optim.clip,
                lr=lr,
                flags=(
                    self.signals.asked,
                    on_torch.is_first() and self.checkpoints.due(),
                    self.checkpoints.troubled(),
                ),
            )
        except on_torch.OutOfMemory as error:
            raise FullshardError(explain_out_of_memory(self.prepared, self.state)) from error
        loss, norm, tokens, skipped, asked, due, troubled = result.numbers()
        self.due, self.troubled = bool(due), bool(troubled)
        self.checkpoints.numbers["loss"] = loss
        seconds = time.perf_counter() - start
        self.asked = bool(asked)
        self.skips += int(skipped)
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped or not math.isfinite(loss) else 0
        memory = on_torch.memory(self.state)
        self.metrics.write(
            step=index + 1,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            tokens=int(tokens),
            tokens_per_second=tokens / seconds,
            mfu=tokens / seconds * self.flops / (self.peak * self.state.plan.mesh.devices) if self.peak else None,
            seconds=seconds,
            data_wait_seconds=waited,
            **{f"{phase}_seconds": s for phase, s in result.seconds().items()},
            skipped=self.skips,
            **memory,
        )
        self.bar.update(index + 1, loss, tokens, memory["memory_allocated"])
        if self.verdict is not None and (line := self.verdict.add(seconds, memory)):
            self.metrics.write(event="predicted", step=index + 1, **self.verdict.numbers)
            self.bar.say(line)
        self._compare(loss)

    def _compare(self, loss: float) -> None:
        """The first resumed loss against the one that the run had at this step before: the quickest sign of trouble."""
        if self.expected is not None and abs(loss - self.expected) > 1e-3 * max(1.0, abs(self.expected)):
            self.bar.say(f"the first resumed loss is {loss:.4f}, before it was {self.expected:.4f}: something else changed")
        self.expected = None

    def evaluate(self, step: int) -> None:
        """The mean loss over the first samples of the held-out data."""
        from fullshard import on_torch

        recipe, plan, valid = self.recipe, self.state.plan, self.prepared.valid
        assert valid is not None
        held_out = Batches(
            valid,
            recipe.data.sequence,
            plan.batch.micro_batch,
            rank=on_torch.data_rank(plan.mesh),
            ranks=plan.mesh.data,
            shuffle=False,
            boundaries=recipe.data.boundaries,
            packing=recipe.data.packing,
        )
        given = self.watchdog.each((s[0] for s in islice(held_out, recipe.eval.batches)), f"the evaluation after step {step}")
        found = on_torch.evaluate(self.state, given, loss=self.loss)
        improved = found < self.best - recipe.eval.min_delta
        self.best, self.since_best = (found, 0) if improved else (self.best, self.since_best + 1)
        self.checkpoints.numbers["eval_loss"] = found
        self.metrics.write(step=step, eval_loss=found)
        self.bar.say(f"step {step}: eval loss {found:.4f}")

    def sample(self, step: int) -> None:
        """Let the model continue the prompts. All ranks compute; the first writes."""
        from fullshard import on_torch

        tokenizer, wanted = self.prepared.tokenizer, self.recipe.sample
        assert tokenizer is not None
        for prompt in self.watchdog.each(wanted.prompts, f"the samples after step {step}"):
            tokens = on_torch.generate(
                self.state.model,
                tokenizer.prompt(prompt),
                max_new_tokens=wanted.tokens,
                temperature=wanted.temperature,
                stop=tokenizer.end_id,
                seed=step,
                window=self.recipe.data.sequence,
            )
            text = tokenizer.decode(tokens)
            self.metrics.write_sample(step=step, prompt=prompt, text=text)
            self.bar.say(f"step {step}: {text!r}")

    def why_stop(self) -> str | None:
        """Why the run ends here, if it does; the same on all ranks."""
        if self.asked:
            return "stopped"
        if self.skips_in_a_row >= self.recipe.train.max_skips or self.checkpoints.poisoned:
            return "diverged"
        if self.recipe.eval.patience and self.since_best >= self.recipe.eval.patience:
            return "no improvement"
        return None


def _told(found: Manifest, key: str, otherwise: Any) -> Any:
    """A number that a run left in its checkpoint; one that a program saved may lack it, or mean something else."""
    value = found.state.get("extra", {}).get(key)
    return value if isinstance(value, int | float) else otherwise


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
    for name, text in (("recipe.json", prepared.recipe.model_dump_json(indent=1) + "\n"), ("plan.json", prepared.plan.to_json())):
        fresh = directory / f".{name}.partial"
        fresh.write_text(text)
        fresh.replace(directory / name)  # a kill leaves the old one or the new one


class Signals:
    """SIGTERM and Ctrl-C ask for an end at the next step boundary; a second Ctrl-C ends at once. Outside the
    `with` they do what they did before."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        self.before = {name: signal.signal(name, self._ask) for name in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for name, handler in self.before.items():
            signal.signal(name, handler)

    def _ask(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
