"""Models, units and plans: what is sharded, and how."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fullshard import presets
from fullshard.commands.common import AsJson, Classes, MinParams, Model, Names, describe_model, print_json
from fullshard.errors import FullshardError
from fullshard.plan import Batch, Plan, Precision, Prefetch
from fullshard.strategies import STRATEGIES, choose

Strategy = StrEnum("Strategy", {name: name for name in STRATEGIES})  # type: ignore[misc]
Remat = StrEnum("Remat", {name: name for name in ("none", "selective", "full")})  # type: ignore[misc]
Sync = StrEnum("Sync", {name: name for name in ("every", "last")})  # type: ignore[misc]
DType = StrEnum("DType", {name: name for name in ("fp32", "bf16", "fp16")})  # type: ignore[misc]


def models(as_json: AsJson = False) -> None:
    """List the presets and their sizes."""
    from fullshard.text import count_text, table

    found = {name: presets.describe(name) for name in presets.PRESETS}
    if as_json:
        print_json({name: {"parameters": d.numel, "units": len(d.units)} for name, d in found.items()})
        return
    rows = [[n, count_text(d.numel), str(presets.PRESETS[n].layers), str(presets.PRESETS[n].dim)] for n, d in found.items()]
    typer.echo(table(["preset", "parameters", "layers", "dim"], rows, right=(1, 2, 3)))


def units(model: Model, classes: Classes = None, names: Names = None, min_params: MinParams = 0, as_json: AsJson = False) -> None:
    """Show which modules of MODEL gather, compute and free together.

    Blocks that repeat are found by themselves; --class, --names or --min-params choose them by hand.
    """
    description = describe_model(model, classes, names, min_params)
    if as_json:
        print_json(description.to_dict())
    else:
        typer.echo(str(description))


def plan(
    model: Model,
    devices: Annotated[int, typer.Option(metavar="N", help="How many devices the plan is for.")],
    strategy_name: Annotated[
        Strategy, typer.Option("--strategy", help="What is sharded, and when it is gathered.")
    ] = Strategy.zero3,  # type: ignore[attr-defined]
    replicate: Annotated[int, typer.Option(metavar="N", help="hybrid: copies of the sharded model (nodes, usually).")] = 1,
    reshard: Annotated[int | None, typer.Option(metavar="N", help="hpz: ranks that keep the parameters after forward.")] = None,
    replicate_below: Annotated[int, typer.Option(metavar="N", help="mixed: units with fewer parameters stay whole.")] = 0,
    keep_whole: Annotated[list[str] | None, typer.Option(metavar="UNIT", help="mixed: units that stay whole.")] = None,
    tensor: Annotated[int, typer.Option(metavar="N", help="Devices each layer is split over.")] = 1,
    compute: Annotated[DType, typer.Option(help="Dtype of gathered parameters and activations.")] = DType.fp32,  # type: ignore[attr-defined]
    reduce: Annotated[DType, typer.Option(help="Dtype of gradients on the wire.")] = DType.fp32,  # type: ignore[attr-defined]
    remat: Annotated[Remat, typer.Option(help="What blocks recompute in backward.")] = Remat.none,  # type: ignore[attr-defined]
    remat_every: Annotated[int, typer.Option(metavar="K", help="Recompute every K-th block only.")] = 1,
    micro_batch: Annotated[int, typer.Option(metavar="N", help="Sequences a rank computes at a time.")] = 1,
    sequence: Annotated[int, typer.Option(metavar="N", help="Tokens in a sequence.")] = 1024,
    accumulate: Annotated[int, typer.Option(metavar="N", help="Micro-batches in a step.")] = 1,
    sync: Annotated[Sync, typer.Option(help="Reduce gradients after every micro-batch, or the last only.")] = Sync.every,  # type: ignore[attr-defined]
    prefetch: Annotated[int, typer.Option(metavar="N", help="Units gathered ahead, forward and backward.")] = 1,
    compile: Annotated[bool, typer.Option("--compile", help="Compile each block.")] = False,
    classes: Classes = None,
    names: Names = None,
    min_params: MinParams = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan as JSON to FILE.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make the plan of a strategy for MODEL and show it; -o writes it for `shard` and for recipes.

    Example: fullshard plan llama3-8b --devices 64 --strategy hybrid --replicate 8 --remat full -o plan.json
    """
    made = choose(
        str(strategy_name),
        describe_model(model, classes, names, min_params),
        devices=devices,
        tensor=tensor,
        replicate=replicate,
        reshard=reshard,
        replicate_below=replicate_below,
        keep_whole=keep_whole or [],
        spell=_spell,
        precision=Precision(compute=str(compute), reduce=str(reduce)),  # type: ignore[arg-type]
        batch=Batch(micro_batch, sequence, accumulate, str(sync)),  # type: ignore[arg-type]
        prefetch=Prefetch(prefetch, prefetch),
        remat=str(remat),
        remat_every=remat_every,
        compile=compile,
    )
    if output:
        _write(output, made)
    typer.echo(made.to_json() if as_json else str(made), nl=not as_json)


def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    diff: Annotated[Path | None, typer.Option(metavar="OTHER", help="Say what differs from PLAN to OTHER instead.")] = None,
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


def _spell(field: str, *value: object) -> str:
    """A field of a strategy as this command's option."""
    return " ".join(["--" + field.replace("_", "-"), *map(str, value)])


def _write(path: Path, made: Plan) -> None:
    try:
        made.save(path)
    except OSError as error:
        raise FullshardError(f"cannot write {path}: {error.strerror}") from None
    typer.echo(f"plan written to {path}", err=True)
