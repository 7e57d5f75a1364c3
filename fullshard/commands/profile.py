"""`fullshard profile`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.base.errors import FullshardError
from fullshard.commands.common import EngineName
from fullshard.commands.train import Given, join_ranks, launch_ranks
from fullshard.launch.local import inside_ranks
from fullshard.ranks.slurm import adopt_slurm

if TYPE_CHECKING:
    from fullshard.runs.prepare.prepare import Prepared


def profile(
    target: Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="A TOML recipe to profile, or a run that was profiled.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes to the recipe.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="Steps to profile.  [default: 3]")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="The directory for the profiled run.  [default: runs/profile-N]")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="Ranks on this machine.  [default: its GPUs, or 2]")
    ] = None,
    engine: EngineName = "torch",
    traces: Annotated[bool, typer.Option("--traces", help="Of a RUN: read its traces again, not its breakdown.json.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the breakdown as JSON.")] = False,
) -> None:
    """Say where the time and the memory of a training step go.

    Of a recipe, a few steps are trained and profiled; nothing is saved but the profile. Of a run, or of a directory
    RUN/profile/step-N, the last profile is shown again.

    Example: fullshard profile recipes/bytes.toml --steps 3 --run runs/looked-at

    Example: fullshard profile runs/looked-at
    """
    if target.is_dir():
        if overrides or steps or run or ranks:
            raise FullshardError(f"{target} is a run: its profile is shown, and takes no overrides, --steps, --run or --ranks")
        return _show(target, traces=traces, as_json=as_json)
    if traces:
        raise FullshardError("--traces has no effect with a recipe; name a run, or leave it out")
    if target.suffix != ".toml" and not target.is_file():
        raise FullshardError(f"{target} is no recipe and no run; name a TOML file, or a directory that a run made")
    joins = adopt_slurm() or inside_ranks()
    if joins and run is None:
        raise FullshardError("under torchrun or srun, give the directory of the profile: --run DIR")
    given = Given(target, overrides or [], run or _free_directory(), ranks, None, False, False, 0, engine, steps or 3, as_json)
    if joins:
        _join(given)
    else:
        launch_ranks(given, _join)


def _join(given: Given, prepared: "Prepared | None" = None) -> None:
    """As `join_ranks`; then the first rank shows the profile."""
    if join_ranks(given, prepared):
        _show(given.run, traces=False, as_json=given.as_json)


def _free_directory() -> Path:
    """The first of runs/profile-1, runs/profile-2 … that is not there."""
    number = 1
    while (directory := Path(f"runs/profile-{number}")).exists():
        number += 1
    return directory


def _show(directory: Path, *, traces: bool, as_json: bool) -> None:
    from fullshard.observe.profile.profile_files import last_profile, profile_text

    text, summary = profile_text(last_profile(directory), traces=traces)
    typer.echo(json.dumps(summary, indent=1) if as_json else text, nl=as_json)
