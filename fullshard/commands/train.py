"""`fullshard train`."""

import os
import shlex
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.base.errors import FullshardError
from fullshard.base.status import phases, say, tell, unsaid
from fullshard.commands.common import EngineName
from fullshard.engine.protocols import Engine, load_engine
from fullshard.launch.local import inside_ranks, launched
from fullshard.ranks.slurm import adopt_slurm

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
        resume = self.resume or ("auto" if self.max_restarts else None)
        options = [*(["--resume", resume] if resume else []), *(["--accept-changes"] if self.accept else [])]
        command = ["profile", "--steps", str(self.profile), *(["--json"] if self.as_json else [])] if self.profile else ["train"]
        return [*command, str(self.recipe), *self.overrides, "--run", str(self.run), "--engine", self.engine, *options]

    def resuming(self) -> str:
        """The command that resumes the run."""
        options = ["--ranks", str(self.ranks)] if self.ranks else []
        options += ["--engine", self.engine] if self.engine != "torch" else []
        options += ["--max-restarts", str(self.max_restarts)] if self.max_restarts else []
        run = ["--run", str(self.run), *options, "--resume", "auto"]
        return shlex.join(["fullshard", "train", str(self.recipe), *self.overrides, *run])


def launch_ranks(given: Given) -> None:
    """Check everything, say what will happen, and start the ranks."""
    from fullshard.launch.local import become_ranks
    from fullshard.runs.announcement import announcement, dry_run_text
    from fullshard.runs.watchdog import Watchdog

    with Watchdog(given.run, HANG_SECONDS) as watchdog:
        with phases("reading the recipe"):
            prepared = _prepare(given, None, watchdog)
        about = dry_run_text if given.dry else announcement
        typer.echo(about(prepared, given.run, given.resume), err=True)
    if given.dry:
        return
    devices, arguments = prepared.plan.mesh.devices, given.for_ranks()
    become_ranks(devices, arguments, given.max_restarts, engine=given.engine, command=given.resuming())


def join_ranks(given: Given) -> bool:
    """Run as one of the ranks that this program, torchrun or srun started. If one rank cannot, all refuse. Returns True on the
    first rank."""
    launch = launched()
    first = "reading the recipe" if launch is None else f"starting {launch.what}"
    seconds = time.time() - launch.since if launch else 0.0
    from fullshard.runs.watchdog import Watchdog

    with phases(first, seconds, announced=launch is not None) if os.environ.get("RANK") == "0" else nullcontext():
        with unsaid() if launch else nullcontext(), Watchdog(given.run, HANG_SECONDS) as watchdog:
            prepared = _prepare_together(given, watchdog)
        if launch is None and prepared.engine.is_first():
            from fullshard.runs.announcement import announcement

            tell(announcement(prepared, given.run, given.resume))
        from fullshard.observe.profile.profile_files import write_profile
        from fullshard.runs.run import execute

        again = launch.command if launch else None
        execute(prepared, given.run, given.resume, accept=given.accept, again=again, reporter=write_profile)
    is_first = prepared.engine.is_first()
    prepared.engine.finish()
    return is_first


def _prepare_together(given: Given, watchdog: "Watchdog") -> "Prepared":
    """As `_prepare`, on all ranks, which must come to the same. Collective."""
    say(f"importing {given.engine}")
    engine = load_engine(given.engine)
    say("joining the other ranks")
    engine.start()
    watchdog.ranks = engine.watched_ranks()
    for option, value in (("ranks", given.ranks), ("dry-run", given.dry), ("max-restarts", given.max_restarts)):
        if value:
            raise FullshardError(f"--{option} has no effect under torchrun or srun, whose ranks this joins; leave it out")
    kept = _kept_by_all(given, engine) if given.resume else None
    prepared = engine.all_or_none(lambda: _prepare(given, engine.all_devices(), watchdog, kept))
    from fullshard.runs.prepare.rank_identity import identity, refuse_disagreement

    refuse_disagreement(engine.all_or_none(lambda: identity(prepared, given.run, given.resume)), engine)
    return prepared


def _kept_by_all(given: Given, engine: Engine[Any, Any]) -> dict[str, Any]:
    """What the run keeps of its checkpoint: the first rank looks, and the others hear of it. Collective."""
    from fullshard.runs.resuming import kept_of

    board = engine.messages()
    engine.first_decides(lambda: board.put("kept", kept_of(_recipe(given), given.run, given.resume)))
    found: dict[str, Any] = board.get("kept")
    return found


def _recipe(given: Given) -> "Recipe":
    from fullshard.runs.recipe.profile_recipe import profile_recipe
    from fullshard.runs.recipe.recipe import load_recipe

    recipe = load_recipe(given.recipe, given.overrides)
    return profile_recipe(recipe, given.profile) if given.profile else recipe


def _prepare(given: Given, ranks: int | None, watchdog: "Watchdog", kept: dict[str, Any] | None = None) -> "Prepared":
    """Check everything that can be checked before ranks start or files are written. `ranks`: of those that are there; None before
    they start. `kept`: what is kept of a checkpoint, if it is known."""
    recipe = _recipe(given)  # a wrong one is told before the seconds that imports take
    watchdog.seconds = recipe.train.hang_seconds
    say(f"importing {given.engine}")
    engine = load_engine(given.engine)
    from fullshard.runs.metrics import refuse_sinks
    from fullshard.runs.prepare.prepare import prepare
    from fullshard.runs.resuming import kept_of, refuse_resume
    from fullshard.runs.run_directory import refuse_path, refuse_run

    refuse_sinks(recipe)
    if given.accept and given.resume is None:
        raise FullshardError("--accept-changes has no effect without --resume; leave it out")
    refuse_path(given.run)
    if ranks is None:
        here = engine.local_devices()  # asked in any case: from then on this process takes none of them
        ranks = here if given.ranks is None else given.ranks
    prepared = prepare(recipe, ranks, engine, kept_of(recipe, given.run, given.resume) if kept is None else kept)
    if given.resume is None:
        refuse_run(given.run)  # before any rank can have made it: ranks wait for each other only later
    elif given.resume != "auto" or os.environ.get("RANK", "0") == "0":  # one rank looks for the newest: the others hear of it
        refuse_resume(given.resume, prepared, given.run, accept=given.accept)
    return prepared
