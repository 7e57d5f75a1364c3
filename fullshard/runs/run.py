"""One run, carried out on all ranks."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError, HostMemoryError, code_of_signal
from fullshard.base.status import say, tell
from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.manifest import Manifest
from fullshard.data.sample_batches import StreamBatches
from fullshard.data.step_batches import close
from fullshard.engine.engine import Engine
from fullshard.engine.ranks import watched_ranks
from fullshard.engine.trainer import RunState, Step
from fullshard.runs.checkpointing import Checkpoints, SaveFailedError, export_end, refuse_export
from fullshard.runs.disk_check import judge_disk
from fullshard.runs.heartbeat import Heartbeat
from fullshard.runs.metrics import Metrics, open_metrics, rewind
from fullshard.runs.outcome import Outcome, outcome_lines
from fullshard.runs.prediction_check import ThisHost, Verdict, explain_out_of_memory
from fullshard.runs.prepare.open_data import batches
from fullshard.runs.prepare.prepare import Prepared, checkpoint_dir_of, disk_of
from fullshard.runs.prepare.recipe_plan import make_optimizer, run_loss
from fullshard.runs.profiling import Profiling, Reporter
from fullshard.runs.progress import Bar
from fullshard.runs.recipe.lr_schedule import factor
from fullshard.runs.rollback import DivergedError, roll_back
from fullshard.runs.run_directory import write_run
from fullshard.runs.samples import continuations
from fullshard.runs.step_numbers import Counts, Flags, StepNumbers
from fullshard.runs.stop_signals import Signals, ignore_signals
from fullshard.runs.train_loop import train
from fullshard.runs.watchdog import Watchdog
from fullshard.storage.memory_limits import resident_bytes


def execute(
    prepared: Prepared,
    directory: Path,
    resume: str | None = None,
    *,
    accept: bool = False,
    again: str | None = None,
    reporter: Reporter | None = None,
) -> int:
    """Train. Collective: every rank calls it. Returns the exit code, the same on all ranks: 0 unless a signal ended the run
    before its last step.

    `resume`: `auto`, or a checkpoint. `accept`: the recipe may change the losses to come. `again`: the command that resumes the
    run, for the user. `reporter`: reports on a profile.
    """
    engine = prepared.engine
    engine.ranks.start()
    with Watchdog(directory, prepared.recipe.train.hang_seconds, watched_ranks(engine.ranks)) as watchdog, ExitStack() as held:
        engine.ranks.agreement().first_decides(lambda: _take(directory, prepared, held))
        outcome = _execute(prepared, directory, resume, accept, reporter, watchdog)
        if engine.ranks.is_first():
            exported = export_end(prepared.recipe, directory) if outcome.step == prepared.recipe.steps else None
            lines = outcome_lines(outcome, prepared.recipe, directory, engine=engine.name, exported=exported, again=again)
            tell("\n".join(lines))
        if outcome.code:
            ignore_signals()
            engine.ranks.agreement().gather(None)  # the first rank has said it all
    return outcome.code


def _take(directory: Path, prepared: Prepared, held: ExitStack) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    held.enter_context(commit.lock_run(directory))
    commit.sweep_run(Local(directory))
    refuse_export(prepared.recipe, directory)


def _execute(
    prepared: Prepared, directory: Path, resume: str | None, accept: bool, reporter: Reporter | None, watchdog: Watchdog
) -> Outcome:
    """Train, and return how the run ended. Raises if it failed."""
    engine, recipe, first = prepared.engine, prepared.recipe, prepared.engine.ranks.is_first()
    # What a checkpoint will overwrite need not be read from elsewhere first.
    weights = None if resume and (resume != "auto" or _any_checkpoint(prepared, directory)) else prepared.weights
    disk = disk_of(recipe, prepared.plan)
    if disk:
        say("timing the disk")
    for line in judge_disk(prepared, disk) if disk else ():
        if first:
            tell(line)
    say(f"sharding the model, with weights from {weights}" if weights else "sharding the model")
    state = engine.trainer.shard(
        prepared.model, prepared.plan, make_optimizer(recipe), seed=recipe.train.seed, weights=weights, disk=disk
    )
    for line in state.notes if first else ():
        tell(line)
    metrics = open_metrics(None, recipe)
    watchdog.compiles, watchdog.heartbeat = state.compiles, Heartbeat(directory / "ranks", *engine.ranks.rank_and_world())
    with Bar(recipe.steps, visible=first, unit=recipe.unit) as bar, Signals() as signals:
        checkpoints = Checkpoints(prepared, state, directory, metrics, bar, accept=accept)
        try:
            manifest = checkpoints.start(resume)
            opened: list[tuple[Metrics, float | None]] = []  # not before: a recipe that is refused must not replace the run's own
            engine.ranks.agreement().first_decides(lambda: opened.append(_open_run(directory, prepared, state.step)))
            metrics, expected = opened[0] if first else (metrics, None)
            metrics.say, checkpoints.metrics = bar.say, metrics
            profiling = Profiling(prepared, state, directory, bar.say, reporter)
            run = Run(prepared, state, metrics, bar, signals, checkpoints, watchdog, profiling)
            run.restore(manifest, expected)
            run.tell_changes()
            run.tell_kernels()
            began, start = time.perf_counter(), state.step
            say("first step" if not state.compiles else "compiling, and the first step")
            failure, why = _train_on(run)
            seconds, newest = time.perf_counter() - began, checkpoints.newest_name() if first else None
            watchdog.finish()
            checkpoints.close()  # not when something was raised: a save in flight may wait for a rank that is gone
        finally:
            metrics.close()
            checkpoints.release()
    if failure:
        raise failure
    code = _stop_code(engine, signals) if why == "stopped" else 0
    return Outcome(state.step, why, state.step - start, seconds, checkpoints.numbers, newest, code)


def _stop_code(engine: Engine[Any, Any], signals: Signals) -> int:
    """The exit code of a run that a signal has ended: that of the first rank which got one. Collective."""
    return code_of_signal(next(filter(None, engine.ranks.agreement().gather(int(signals.first)))))


def _any_checkpoint(prepared: Prepared, directory: Path) -> bool:
    """Whether a rank sees one: machines may have directories of their own. Collective."""
    checkpoint_dir = checkpoint_dir_of(prepared.recipe, directory)
    return any(prepared.engine.ranks.agreement().gather(bool(commit.committed(checkpoint_dir))))


def _open_run(directory: Path, prepared: Prepared, step: int) -> tuple[Metrics, float | None]:
    """Open the run's files. Returns its metrics, and the loss that it had before at the next step."""
    try:
        write_run(directory, prepared)
        expected = rewind(directory, step)
        return open_metrics(directory, prepared.recipe, step), expected
    except OSError as error:
        raise FullshardError(
            f"cannot write to {directory}: {error.strerror or error}; make room, or give another --run"
        ) from None


def _train_on(run: "Run") -> tuple[FullshardError | None, str | None]:
    """Train to the end, rolling back if needed. Returns the error that ended the run, if any, the same on all ranks; and why it
    ended before its last step."""
    try:
        while True:
            why = run.train()
            if why != "diverged":
                run.finish(why)
                if not run.checkpoints.poisoned:
                    return None, why
            with run.watchdog.saving():
                roll_back(run)
    except (DivergedError, SaveFailedError) as error:
        why = "diverged" if isinstance(error, DivergedError) else "not saved"
        run.metrics.write(event=why, step=run.state.step)
        return error, why


# By the name in the event `kernels`.
KERNEL_USES = {
    "cpu_update": "CPU updates run",
    "gpu_update": "GPU updates run",
    "update": "updates run",
    "chunked_loss": "the chunked loss runs",
    "wire": "quantised collectives run",
}


class Run:
    """A run in progress on this rank."""

    def __init__(
        self,
        prepared: Prepared,
        state: RunState,
        metrics: Metrics,
        bar: Bar,
        signals: Signals,
        checkpoints: Checkpoints,
        watchdog: Watchdog,
        profiling: Profiling,
    ):
        self.prepared, self.engine, self.recipe, self.state = prepared, prepared.engine, prepared.recipe, state
        self.metrics, self.bar, self.signals, self.checkpoints, self.watchdog = metrics, bar, signals, checkpoints, watchdog
        self.profiling, self.share = profiling, self.engine.ranks.data_share(state.plan.mesh)
        self.source = batches(self.recipe, state.plan, prepared.data, self.share, self.engine)
        if isinstance(self.source, StreamBatches):
            self.source.say = bar.say
        self.steps: Iterator[Any] = iter(())
        self.told = state.notes
        self.loss = self.engine.trainer.named_loss(run_loss(self.recipe))
        self.flops = self.engine.machine.flops_per_token(state.model, self.recipe.sequence)
        self.peak = self.engine.machine.peak_flops(state) if self.recipe.unit == "tokens" else None
        self.verdict = (
            Verdict(prepared.estimate, ThisHost(prepared, state), own_kernels=self.engine.traits.predicted)
            if prepared.estimate
            else None
        )
        self.began = self.waited = 0.0  # the step under way: when it began, and seconds that it waited for data
        self.asked = False  # by a signal, on any rank
        self.counts = Counts()
        self.expected: float | None = None  # the loss that the first resumed step had before

    def stored(self) -> dict[str, Any]:
        """What a resumed run needs besides the state and the cursor."""
        return self.counts.stored() | ({"stream": self.source.state} if isinstance(self.source, StreamBatches) else {})

    def restore(self, manifest: Manifest | None, expected: float | None) -> None:
        """Continue from a checkpoint."""
        if manifest is not None:
            self.counts, self.expected = Counts.of(manifest), expected
            assert manifest.cursor is not None
            self.source.cursor = manifest.cursor
            if isinstance(self.source, StreamBatches):
                self.source.resume(manifest.cursor, manifest.state.get("extra", {}).get("stream"))
        close(self.steps)
        self.steps = iter(self.source)

    def tell_changes(self) -> None:
        """Report what the recipe changes since the checkpoint."""
        for key, old, new in self.checkpoints.changes:
            self.metrics.write(event="recipe changed", step=self.state.step, key=key, old=old, new=new)
            self.bar.say(f"changed since the checkpoint: {key} {old} → {new}")

    def tell_kernels(self) -> None:
        """Record which kernels compute loss, updates and messages. Print it if a fast one is missing."""
        kernels = {k: v for k, v in self.state.kernels.items() if k != "chunked_loss" or run_loss(self.recipe) == "chunked"}
        if kernels:
            self.metrics.write(event="kernels", step=self.state.step, **kernels)
        for lane, text in kernels.items():
            if text.startswith("torch: "):
                self.bar.say(f"{KERNEL_USES[lane]} on torch's slower kernels: {text.partition(': ')[2]}")

    def tell_wire(self) -> None:
        """Report the errors of quantised collectives, which the first step measures."""
        if errors := self.state.wire_errors:
            self.metrics.write(event="wire", step=self.state.step, **{f"{kind}_error": e for kind, e in errors.items()})
            self.bar.say("quantised collectives, relative error: " + ", ".join(f"{k} {e:.2%}" for k, e in errors.items()))

    def tell_notes(self) -> None:
        """Print what the first step has found out about the state."""
        for line in self.state.notes if self.engine.ranks.is_first() else ():
            if line not in self.told:
                self.bar.say(line)

    def train(self) -> str | None:
        """Train to the last step. Returns why the run ends before it, if it does."""
        try:
            for _ in self.trained_steps():
                if why := self.why_stop():
                    return why
        except Exception as error:
            if not self.engine.machine.out_of_memory(error):
                raise
            kind = HostMemoryError if self.engine.machine.out_of_host_memory(error) else FullshardError
            raise kind(explain_out_of_memory(self.prepared, self.state)) from error
        return None

    def finish(self, why: str | None) -> None:
        """Save the state as the run leaves it. `why`: what ends it before its last step, if anything."""
        if why:
            self.metrics.write(event=why, step=self.state.step)
            self.bar.say(f"ended after step {self.state.step}: {why}")
        with self.watchdog.saving():
            good = not self.counts.skips_in_a_row
            self.checkpoints.finish(self.source.cursor, self.stored(), good, lambda: self.signals.asked)

    def trained_steps(self) -> Iterator[Step]:
        """The steps to the last, each trained and recorded, with what was due after it done."""
        recipe, first = self.recipe, self.state.step
        results = train(
            self.state,
            self._timed_batches(),
            steps=recipe.steps - first,
            loss=self.loss,
            clip=recipe.optim.clip,
            lr=lambda i: self._learning_rate(first + i),
            flags=self._flags,
            unit_norms=recipe.log.unit_norms,
        )
        for result in results:
            if result.index == first + 1:
                self.tell_wire()
                self.tell_notes()
            numbers = StepNumbers.of(result)
            self._record(result, numbers)
            self.watchdog.end(time.perf_counter() - self.began)
            if recipe.eval.every and result.index % recipe.eval.every == 0:
                self.evaluate(result.index)
            if recipe.sample.every and result.index % recipe.sample.every == 0:
                self.sample(result.index)
            with self.watchdog.saving():
                self.profiling.finish(result.index)
                good = not self.counts.skips_in_a_row
                self.checkpoints.after_step(numbers.flags.due, numbers.flags.troubled, good, self.source.cursor, self.stored())
            self.checkpoints.refuse_lost()
            yield result

    def _timed_batches(self) -> Iterator[Any]:
        """The data, each step's list of micro-batches. A step begins when its data is asked for."""
        while True:
            self.profiling.begin(self.state.step + 1)
            self.began = time.perf_counter()
            self.watchdog.begin(self.state.step + 1)
            again = isinstance(self.source, StreamBatches) and self.source.reads_again
            with self.watchdog.saving("reading the data again") if again else nullcontext():
                micro_batches = next(self.steps)
            self.waited = time.perf_counter() - self.began
            self.profiling.data_here()
            yield micro_batches

    def _learning_rate(self, index: int) -> float:
        return self.recipe.optim.lr * factor(index, self.recipe.steps, **self.recipe.schedule.model_dump())

    def _flags(self) -> Flags:
        return Flags(self.signals.asked, self.engine.ranks.is_first() and self.checkpoints.due(), self.checkpoints.troubled())

    def _record(self, result: Step, numbers: StepNumbers) -> None:
        """Write the step's line."""
        self.profiling.end()
        unit = self.recipe.unit
        count = int(numbers.count) if unit == "tokens" else self.source.step_samples
        self.checkpoints.numbers["loss"] = numbers.loss
        seconds = time.perf_counter() - self.began
        self.asked = numbers.flags.asked
        self.counts.step(numbers)
        memory = self.engine.machine.memory(self.state) | resident_bytes()
        self.metrics.write(
            step=result.index,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
            lr=self._learning_rate(result.index - 1),
            **{unit: count, f"{unit}_per_second": count / seconds},
            mfu=count / seconds * self.flops / (self.peak * self.state.plan.mesh.devices) if self.peak else None,
            seconds=seconds,
            data_wait_seconds=self.waited,
            **{f"{phase}_seconds": s for phase, s in result.seconds().items()},
            skipped=self.counts.skips,
            **numbers.metrics,
            **memory,
            **{f"grad_norm/{unit}": norm for unit, norm in numbers.unit_norms.items()},
        )
        self.bar.update(result.index, numbers.loss, count, memory["memory_allocated"], seconds)
        if self.verdict is not None and (line := self.verdict.add(seconds, memory)):
            self.metrics.write(event="predicted", step=result.index, **self.verdict.numbers)
            self.bar.say(line)
        self._compare(numbers.loss)

    def _compare(self, loss: float) -> None:
        """Compare the first resumed loss with the one that the run had at this step before."""
        if self.expected is not None and abs(loss - self.expected) > 1e-3 * max(1.0, abs(self.expected)):
            self.bar.say(f"the first resumed loss is {loss:.4f}, before it was {self.expected:.4f}: something else changed")
        self.expected = None

    def evaluate(self, step: int) -> None:
        """The mean loss over the first samples of the held-out data."""
        recipe, plan, valid = self.recipe, self.state.plan, self.prepared.valid
        assert valid is not None
        held_out = batches(recipe, plan, valid, self.share, self.engine, held_out=True)
        given = self.watchdog.each((s[0] for s in held_out), f"the evaluation after step {step}")
        means = self.engine.trainer.evaluate(self.state, given, loss=self.loss)
        self.counts.evaluated(means["loss"], recipe.eval.min_delta)
        self.checkpoints.numbers["eval_loss"] = means["loss"]
        self.metrics.write(step=step, **{f"eval_{name}": mean for name, mean in means.items()})
        self.bar.say(f"step {step}: " + ", ".join(f"eval {name} {mean:.4f}" for name, mean in means.items()))

    def sample(self, step: int) -> None:
        """Let the model continue the prompts. All ranks compute; the first writes."""
        prompts = self.watchdog.each(self.recipe.sample.prompts, f"the samples after step {step}")
        for prompt, text in continuations(self.prepared, self.state.model, prompts, seed=step):
            self.metrics.write_sample(step=step, prompt=prompt, text=text)
            self.bar.say(f"step {step}: {text!r}")

    def why_stop(self) -> str | None:
        """Why the run ends here, if it does; the same on all ranks."""
        if self.asked and self.state.step < self.recipe.steps:
            return "stopped"
        if self.counts.skips_in_a_row >= self.recipe.train.max_skips or self.checkpoints.poisoned:
            return "diverged"
        if self.recipe.eval.patience and self.counts.since_best >= self.recipe.eval.patience:
            return "no improvement"
        return None
