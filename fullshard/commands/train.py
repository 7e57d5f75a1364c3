"""`fullshard train`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fullshard.errors import FullshardError
from fullshard.launch.local import inside_ranks
from fullshard.slurm import adopt_slurm


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes to the recipe.")
    ] = None,
    run: Annotated[Path, typer.Option("--run", metavar="DIR", help="The run's directory.")] = Path("runs/latest"),
    ranks: Annotated[int | None, typer.Option(metavar="N", help="Ranks on this machine.  [default: its GPUs, or 2]")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="auto|PATH", help="Go on from the run's newest whole checkpoint, or from PATH.")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, and stop.")] = False,
) -> None:
    """Train what a recipe says, on all GPUs of this machine or on 2 CPU ranks.

    Under an outer torchrun or srun it joins the ranks that are there.

    Example: fullshard train recipes/bytes.toml --run runs/first --resume auto

    Example: fullshard train recipes/bytes.toml train.steps=200 optim.lr=1e-3 --run runs/first
    """
    inside = adopt_slurm() or inside_ranks()  # first: what follows may refuse, and only rank 0 shall say so
    try:
        from fullshard.train.recipe import load_recipe

        loaded = load_recipe(recipe, overrides or [])  # a wrong one is told before the seconds that torch takes
        from fullshard import on_torch
    except ImportError as error:
        raise FullshardError(f"training needs torch ({error}); pip install 'fullshard[torch]'") from None
    from fullshard.launch.local import become_ranks
    from fullshard.train.checkpoints import refuse_resume
    from fullshard.train.metrics import refuse_sinks
    from fullshard.train.prepare import prepare
    from fullshard.train.run import execute, refuse_path, refuse_run

    refuse_sinks(loaded)
    for option, given in (("ranks", ranks is not None), ("dry-run", dry)):
        if inside and given:
            raise FullshardError(f"--{option} has no effect under torchrun or srun, whose ranks this joins; leave it out")
    refuse_path(run)
    prepared = prepare(loaded, _world() if inside else ranks)
    if resume is None:
        refuse_run(run)  # before any rank can have made it: ranks wait for each other only later
    elif resume != "auto":
        refuse_resume(resume, prepared, run)
    if inside:
        try:
            execute(prepared, run, resume)
        finally:
            on_torch.finish()
        return
    weights = f"weights from {prepared.weights}" if prepared.weights else "weights drawn"
    typer.echo(f"{loaded.model_dump_json(indent=1)}\n\n{prepared.plan}\n\n{weights}; {loaded.steps} steps into {run}", err=True)
    if not dry:
        resumed = ["--resume", resume] if resume else []
        become_ranks(prepared.plan.mesh.devices, ["train", str(recipe), *(overrides or []), "--run", str(run), *resumed])


def _world() -> int:
    return int(os.environ["WORLD_SIZE"])
