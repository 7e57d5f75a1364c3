"""`fullshard models`, `units`, `plan` and `explain`: what is sharded, and how."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fullshard.base.errors import FullshardError
from fullshard.commands.common import AsJson, Classes, EngineName, MinParams, Model, Names, describe_model, print_json
from fullshard.commands.option_groups import grouped
from fullshard.commands.search_plan import SearchOptions, search, show_found
from fullshard.commands.strategy_plan import PANEL, GivenChoices, UnitOptions, refuse_beside_cluster, strategy_plan
from fullshard.model import presets
from fullshard.plan.engine_traits import ENGINES, refuse_engine
from fullshard.plan.plan import Plan


def models(as_json: AsJson = False) -> None:
    """List the presets and their sizes."""
    from fullshard.base.text import count_text, table

    known = {name: presets.describe(name) for name in presets.PRESETS}
    if as_json:
        print_json({name: {"parameters": d.numel, "units": len(d.units)} for name, d in known.items()})
        return
    rows = [[n, count_text(d.numel), str(presets.PRESETS[n].layers), str(presets.PRESETS[n].dim)] for n, d in known.items()]
    typer.echo(table(["preset", "parameters", "layers", "dim"], rows, right=(1, 2, 3)))


def units(
    model: Model,
    classes: Classes = None,
    names: Names = None,
    min_params: MinParams = 0,
    engine: EngineName = "torch",
    as_json: AsJson = False,
) -> None:
    """Show which modules of MODEL gather, compute and free together.

    Blocks that repeat are found by themselves; --class, --names or --min-params choose them by hand.
    """
    description = describe_model(model, classes, names, min_params, engine=engine)
    if as_json:
        print_json(description.to_dict())
    else:
        typer.echo(str(description))


@grouped
def plan(
    context: typer.Context,
    model: Model,
    search_options: SearchOptions,
    choices: GivenChoices,
    unit_options: UnitOptions,
    devices: Annotated[
        int | None, typer.Option("--devices", metavar="N", help="How many devices the plan is for.", rich_help_panel=PANEL)
    ] = None,
    sequence: Annotated[int, typer.Option("--sequence", metavar="N", help="Tokens in a sequence.")] = 1024,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", metavar="|".join(ENGINES), help="What shall carry the plan out.", show_default="torch; jax for TPUs"
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan as JSON to FILE.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best plan for MODEL on a cluster, or make the plan of a strategy; -o writes it for `shard` and recipes.

    With --cluster every strategy, mesh, micro-batch and remat choice is tried on paper and the fastest that fits is
    shown, with what it costs and why others lost. With --devices the plan is what the options say.

    Example: fullshard plan llama3-8b --cluster 64xh100 --sequence 8192 --global-batch 256 -o plan.json

    Example: fullshard plan llama3-8b --devices 64 --strategy hybrid --replicate 8 --remat full -o plan.json
    """
    if engine is not None:
        refuse_engine(engine)
    if (search_options.cluster is None) == (devices is None):
        raise FullshardError("give either --cluster, to find the best plan for it, or --devices, to make one by hand")
    wanted = _with_extra_fixes(search_options, context.args)
    if wanted.cluster is not None:
        refuse_beside_cluster(choices, unit_options)
        result, saves = search(model, sequence, wanted, engine)
        if output:
            _write(output, result.plan)
        show_found(result, saves, as_json=as_json)
        return
    for option in wanted.given():
        raise FullshardError(f"{option} has no effect with --devices; write --cluster, or leave it out")
    assert devices is not None
    made = strategy_plan(model, sequence, devices, choices, unit_options, engine or "torch")
    if output:
        _write(output, made)
    typer.echo(made.to_json() if as_json else str(made), nl=not as_json)


def _with_extra_fixes(options: SearchOptions, extra: list[str]) -> SearchOptions:
    """`--fix` takes several KEY=VALUE; click hands on the second and later ones as extra arguments."""
    if extra and not (options.fix and all("=" in more for more in extra)):
        raise FullshardError(f"{extra[0]!r} follows no option that takes it; write MODEL once, and choices after --fix")
    return replace(options, fix=[*(options.fix or []), *extra])


def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    diff: Annotated[
        Path | None, typer.Option("--diff", metavar="OTHER", help="Say what differs from PLAN to OTHER instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan file as a table, or say in words how another one differs from it."""
    first = Plan.load(path)
    if diff is None:
        typer.echo(first.to_json() if as_json else str(first), nl=not as_json)
        return
    lines = first.diff(Plan.load(diff))
    if as_json:
        print_json(lines)
    else:
        typer.echo("\n".join(lines) or "the two plans are the same")


def _write(path: Path, made: Plan) -> None:
    try:
        made.save(path)
    except OSError as error:
        raise FullshardError(f"cannot write {path}: {error.strerror}") from None
    typer.echo(f"plan written to {path}", err=True)
