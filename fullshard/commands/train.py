"""`fullshard train`."""

import os
import shlex
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.base.errors import FullshardError
from fullshard.base.status import phases, say, tell, unsaid
from fullshard.commands.common import EngineName
from fullshard.engine.engine import load_engine
from fullshard.engine.ranks import watched_ranks
from fullshard.launch.local import end_with_launcher, inside_ranks, launched
from fullshard.launch.rank_processes import stay_forkable
from fullshard.plan.engine_traits import DEFAULT_ENGINE
from fullshard.ranks.slurm import adopt_slurm
from fullshard.runs.stop_signals import end_early_on_sigusr1

if TYPE_CHECKING:
    from fullshard.runs.prepare.prepare import Prepared
    from fullshard.runs.recipe.recipe import Recipe
    from fullshard.runs.watchdog import Watchdog

# By a parser of its own: typer's looks at the path, on a file system that may not answer, before anything watches.
RunDirectory = Annotated[Path, typer.Option("--run", metavar="DIR", parser=Path, help="The run's directory.")]
HANG_SECONDS = 300.0  # until the recipe is read, which has its own


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes to the recipe.")
    ] = None,
    run: RunDirectory = Path("runs/latest"),
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="Ranks on this machine.  [default: its GPUs, or 2]")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="auto|PATH", help="Go on from the run's newest whole checkpoint, or from PATH."),
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept-changes", help="Resume although the recipe changes how training goes on.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", min=0, help="Start the ranks again, up to N times, when some fail.")
    ] = 0,
    engine: EngineName = "torch",
    dry: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, and stop.")] = False,
) -> None:
    """Train what a recipe says, on all GPUs of this machine or on 2 CPU ranks.

    Under an outer torchrun or srun it joins the ranks that are there.

    Example: fullshard train recipes/bytes.toml --run runs/first --resume auto

    Example: fullshard train recipes/bytes.toml --run runs/first --max-restarts 3

    Example: fullshard train recipes/bytes.toml train.steps=200 optim.lr=1e-3 --run runs/first
    """
    given = Given(recipe, overrides or [], run, ranks, resume, dry, accept, max_restarts, engine)
    if adopt_slurm() or inside_ranks():
        join_ranks(given)
    else:
        launch_ranks(given)


@dataclass(frozen=True)
class Given:
    """The options of the command line."""

    recipe: Path
    overrides: list[str]
    run: Path
    ranks: int | None
    resume: str | None
    dry: bool
    accept: bool
    max_restarts: int
    engine: str
    profile: int = 0  # steps to profile, after which the run ends; 0: train
    as_json: bool = False  # how the profile is printed

    def for_ranks(self) -> list[str]:
        """The command line of a rank. A restarted rank resumes from the newest checkpoint."""
        resume = self.in_ranks().resume
        options = [*(["--resume", resume] if resume else []), *(["--accept-changes"] if self.accept else [])]
        command = ["profile", "--steps", str(self.profile), *(["--json"] if self.as_json else [])] if self.profile else ["train"]
        return [*command, str(self.recipe), *self.overrides, "--run", str(self.run), "--engine", self.engine, *options]

    def in_ranks(self) -> "Given":
        """The options of a rank, as `for_ranks` has them."""
        resume = self.resume or ("auto" if self.max_restarts else None)
        return replace(self, ranks=None, max_restarts=0, resume=resume)

    def resuming(self) -> str:
        """The command that resumes the run."""
        options = ["--ranks", str(self.ranks)] if self.ranks else []
        options += ["--engine", self.engine] if self.engine != DEFAULT_ENGINE else []
        options += ["--max-restarts", str(self.max_restarts)] if self.max_restarts else []
        run = ["--run", str(self.run), *options, "--resume", "auto"]
        return shlex.join(["fullshard", "train", str(self.recipe), *self.overrides, *run])


def launch_ranks(given: Given, join: "Callable[[Given, Prepared], object] | None" = None) -> None:
    """Check everything, say what will happen, and start the ranks. `join`: what each does, by default `join_ranks`."""
    end_early_on_sigusr1()
    from fullshard.launch.local import become_ranks
    from fullshard.runs.announcement import announcement, dry_run_text
    from fullshard.runs.watchdog import Watchdog

    with Watchdog(given.run, HANG_SECONDS) as watchdog:
        with phases("reading the recipe"):
            prepared = _prepare(given, watchdog)
        about = dry_run_text if given.dry else announcement
        typer.echo(about(prepared, given.run, given.resume), err=True)
    if given.dry:
        return
    become_ranks(
        prepared.plan.mesh.devices,
        given.for_ranks(),
        given.max_restarts,
        engine=given.engine,
        command=given.resuming(),
        run=lambda: (join or join_ranks)(given.in_ranks(), prepared),
    )


def join_ranks(given: Given, prepared: "Prepared | None" = None) -> bool:
    """Run as one of the ranks that this program, torchrun or srun started. If one rank cannot, all refuse. `prepared`: by the
    launcher, of which this rank is a copy. Returns True on the first rank. Exits if a signal ended the run."""
    end_early_on_sigusr1()
    end_with_launcher()
    launch = launched()
    first = "reading the recipe" if launch is None else f"starting {launch.what}"
    seconds = time.time() - launch.since if launch else 0.0
    from fullshard.runs.watchdog import Watchdog

    with phases(first, seconds, announced=launch is not None) if os.environ.get("RANK") == "0" else nullcontext():
        with unsaid() if launch else nullcontext(), Watchdog(given.run, HANG_SECONDS) as watchdog:
            prepared = _prepare_together(given, watchdog, prepared)
        if launch is None and prepared.engine.ranks.is_first():
            from fullshard.runs.announcement import announcement

            tell(announcement(prepared, given.run, given.resume))
        from fullshard.observe.profile.profile_files import write_profile
        from fullshard.runs.run import execute

        again = launch.command if launch else None
        code = execute(prepared, given.run, given.resume, accept=given.accept, again=again, reporter=write_profile)
    is_first = prepared.engine.ranks.is_first()
    prepared.engine.ranks.finish()
    if code:
        raise SystemExit(code)
    return is_first


def _read(given: Given, watchdog: "Watchdog") -> "Recipe":
    """The recipe. What is wrong with it or with the options is told before the seconds that imports take."""
    from fullshard.runs.recipe.profile_recipe import profile_recipe
    from fullshard.runs.recipe.recipe import load_recipe

    recipe = load_recipe(given.recipe, given.overrides)
    watchdog.seconds = recipe.train.hang_seconds
    from fullshard.runs.metrics import refuse_sinks
    from fullshard.runs.run_directory import refuse_path

    refuse_sinks(recipe)
    if given.accept and given.resume is None:
        raise FullshardError("--accept-changes has no effect without --resume; leave it out")
    refuse_path(given.run)
    return profile_recipe(recipe, given.profile) if given.profile else recipe


def _prepare(given: Given, watchdog: "Watchdog") -> "Prepared":
    """Check everything that can be checked before ranks start or files are written."""
    recipe = _read(given, watchdog)
    say(f"importing {given.engine}")
    engine = load_engine(given.engine)
    stay_forkable()
    from fullshard.runs.prepare.prepare import prepare
    from fullshard.runs.resuming import kept_of

    here = engine.machine.local_devices()  # asked in any case: from then on this process takes none of them
    ranks = here if given.ranks is None else given.ranks
    prepared = prepare(recipe, ranks, engine, kept_of(recipe, given.run, given.resume))
    _refuse_run(given, prepared)
    return prepared


def _prepare_together(given: Given, watchdog: "Watchdog", prepared: "Prepared | None" = None) -> "Prepared":
    """As `_prepare`, on all ranks, which must have been told the same. Copies of a launcher have what it prepared. Collective."""
    say(f"importing {given.engine}")
    engine = load_engine(given.engine)
    from fullshard.runs.prepare.prepare import prepare_together, reopen_data
    from fullshard.runs.resuming import kept_of

    say("joining the other ranks")
    engine.ranks.start()
    watchdog.ranks = watched_ranks(engine.ranks)
    for option, value in (("ranks", given.ranks), ("dry-run", given.dry), ("max-restarts", given.max_restarts)):
        if value:
            raise FullshardError(f"--{option} has no effect under torchrun or srun, whose ranks this joins; leave it out")
    if prepared is not None:
        watchdog.seconds = prepared.recipe.train.hang_seconds
        return engine.ranks.agreement().all_or_none(partial(reopen_data, prepared))
    recipe = engine.ranks.agreement().all_or_none(lambda: _read(given, watchdog))
    told = {"--run": str(given.run), "--resume": given.resume}
    prepared = prepare_together(recipe, engine, lambda: kept_of(recipe, given.run, given.resume), told)
    engine.ranks.agreement().all_or_none(lambda: _refuse_run(given, prepared))
    return prepared


def _refuse_run(given: Given, prepared: "Prepared") -> None:
    """Refuse a directory that holds another run, and a checkpoint that this one cannot go on from."""
    from fullshard.runs.resuming import refuse_resume
    from fullshard.runs.run_directory import refuse_run

    if given.resume is None:
        refuse_run(given.run)
    elif given.resume != "auto" or os.environ.get("RANK", "0") == "0":  # one rank looks for the newest: the others hear of it
        refuse_resume(given.resume, prepared, given.run, accept=given.accept)
