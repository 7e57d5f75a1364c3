"""Models, units and plans: what is sharded, and how."""

from contextlib import suppress
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.commands.common import AsJson, Classes, MinParams, Model, Names, describe_costs, describe_model, print_json
from fullshard.errors import FullshardError
from fullshard.model import presets
from fullshard.plan import Batch, Plan, Precision, Prefetch
from fullshard.planner.checkpoint_interval import SaveCost, parse_mtbf, save_cost
from fullshard.strategies import STRATEGIES, choose

if TYPE_CHECKING:
    from fullshard.cluster.cluster import Cluster
    from fullshard.planner.search.search import SearchResult

Loss = StrEnum("Loss", {name: name for name in ("chunked", "plain")})  # type: ignore[misc]
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
    context: typer.Context,
    model: Model,
    devices: Annotated[int | None, typer.Option(metavar="N", help="How many devices the plan is for.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="CLUSTER", help="Find the best plan for it: 64xh100, or a file of `measure`.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(metavar="N", help="--cluster: sequences in a step, over all devices.", show_default="1 a device")
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE …", help="--cluster: pin choices (remat=full home.optimizer=host …)."),
    ] = None,
    limit: Annotated[
        str | None, typer.Option(metavar="BYTES", help="--cluster: memory of a device to use, such as 24GiB.")
    ] = None,
    mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="--cluster: a device fails every 50000h, 400d, 5y: how often to save.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="N", help="--cluster: of one device for an hour: what a million tokens cost.")
    ] = None,
    no_clip: Annotated[
        bool, typer.Option("--no-clip", help="--cluster: gradients are not clipped, so that no update waits for their norm.")
    ] = False,
    loss: Annotated[Loss, typer.Option(help="--cluster: how the loss is computed.")] = Loss.chunked,  # type: ignore[attr-defined]
    strategy_name: Annotated[
        Strategy | None, typer.Option("--strategy", help="What is sharded, and when it is gathered.", show_default="zero3")
    ] = None,
    replicate: Annotated[int, typer.Option(metavar="N", help="hybrid: copies of the sharded model (nodes, usually).")] = 1,
    reshard: Annotated[int | None, typer.Option(metavar="N", help="hpz: ranks that keep the parameters after forward.")] = None,
    replicate_below: Annotated[int, typer.Option(metavar="N", help="mixed: units with fewer parameters stay whole.")] = 0,
    keep_whole: Annotated[list[str] | None, typer.Option(metavar="UNIT", help="mixed: units that stay whole.")] = None,
    tensor: Annotated[int, typer.Option(metavar="N", help="Devices each layer is split over.")] = 1,
    compute: Annotated[
        DType | None, typer.Option(help="Dtype of gathered parameters and activations.", show_default="fp32")
    ] = None,
    reduce: Annotated[DType, typer.Option(help="Dtype of gradients on the wire.")] = DType.fp32,  # type: ignore[attr-defined]
    remat: Annotated[Remat | None, typer.Option(help="What blocks recompute in backward.", show_default="none")] = None,
    remat_every: Annotated[int, typer.Option(metavar="K", help="Recompute every K-th block only.")] = 1,
    micro_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Sequences a rank computes at a time.", show_default="1")
    ] = None,
    sequence: Annotated[int, typer.Option(metavar="N", help="Tokens in a sequence.")] = 1024,
    accumulate: Annotated[int | None, typer.Option(metavar="N", help="Micro-batches in a step.", show_default="1")] = None,
    sync: Annotated[
        Sync | None, typer.Option(help="Reduce gradients after every micro-batch, or the last only.", show_default="every")
    ] = None,
    prefetch: Annotated[
        int | None, typer.Option(metavar="N", help="Units gathered ahead, forward and backward.", show_default="1")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile each block.")] = False,
    classes: Classes = None,
    names: Names = None,
    min_params: MinParams = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan as JSON to FILE.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best plan for MODEL on a cluster, or make the plan of a strategy; -o writes it for `shard` and recipes.

    With --cluster every strategy, mesh, micro-batch and remat choice is tried on paper and the fastest that fits is
    shown, with what it costs and why others lost. With --devices the plan is what the options say.

    Example: fullshard plan llama3-8b --cluster 64xh100 --sequence 8192 --global-batch 256 -o plan.json

    Example: fullshard plan llama3-8b --devices 64 --strategy hybrid --replicate 8 --remat full -o plan.json
    """
    if (cluster is None) == (devices is None):
        raise FullshardError("give either --cluster, to find the best plan for it, or --devices, to make one by hand")
    if context.args and not (fix and all("=" in more for more in context.args)):
        raise FullshardError(f"{context.args[0]!r} follows no option that takes it; write MODEL once, and choices after --fix")
    fix = [*(fix or []), *context.args]
    own = {
        "strategy": strategy_name, "compute": compute, "remat": remat, "micro_batch": micro_batch, "accumulate": accumulate,
        "sync": sync, "prefetch": prefetch, "reshard": reshard, "compile": compile or None,
        "replicate": replicate if replicate != 1 else None, "tensor": tensor if tensor != 1 else None,
    }  # fmt: skip
    if cluster is not None:
        for option, on in own.items():
            if on is not None:
                raise FullshardError(f"{_spell(option)} has no effect with --cluster; write --fix {option}={on}")
        failing = parse_mtbf(mtbf) if mtbf else None
        found = _search(model, _priced(cluster, price), sequence, global_batch, fix, limit, str(loss), clip=not no_clip)
        if output:
            _write(output, found.plan)
        _show_found(found, as_json, _saving(found, model, sequence, cluster, failing) if failing else None)
        return
    for option, given in (
        ("--global-batch", global_batch),
        ("--fix", fix),
        ("--limit", limit),
        ("--mtbf", mtbf),
        ("--price", price),
        ("--no-clip", no_clip),
    ):
        if given:
            raise FullshardError(f"{option} has no effect with --devices; write --cluster, or leave it out")
    assert devices is not None
    made = choose(
        str(strategy_name or "zero3"),
        describe_model(model, classes, names, min_params),
        devices=devices,
        tensor=tensor,
        replicate=replicate,
        reshard=reshard,
        replicate_below=replicate_below,
        keep_whole=keep_whole or [],
        spell=_spell,
        precision=Precision(compute=str(compute or "fp32"), reduce=str(reduce)),  # type: ignore[arg-type]
        batch=Batch(micro_batch or 1, sequence, accumulate or 1, str(sync or "every")),  # type: ignore[arg-type]
        prefetch=Prefetch(prefetch or 1, prefetch or 1),
        remat=str(remat or "none"),
        remat_every=remat_every,
        compile=compile,
    )
    if output:
        _write(output, made)
    typer.echo(made.to_json() if as_json else str(made), nl=not as_json)


def _priced(name: str, price: float | None) -> "Cluster":
    from fullshard.cluster.cluster import Cluster

    found = Cluster.load(name)
    if price is None:
        return found
    if not 0 < price < float("inf"):
        raise FullshardError(f"--price is what a device costs an hour, a number above 0, not {price:g}")
    return replace(found, device=replace(found.device, price=price))


def _search(
    model: str,
    where: "Cluster",
    sequence: int,
    global_batch: int | None,
    fix: list[str],
    limit: str | None,
    loss: str,
    *,
    clip: bool,
) -> "SearchResult":
    from fullshard.planner.search.search import find_plan
    from fullshard.text import parse_bytes

    pinned = dict(_pin(text) for text in fix)
    room = parse_bytes(limit) if limit else None
    compute: Any = pinned.get("compute", "fp32" if where.device.kind == "cpu" else "bf16")
    tensor = pinned.get("tensor", 1)
    return find_plan(
        describe_costs(model, sequence, compute, tensor if isinstance(tensor, int) else 1),
        where,
        sequence=sequence,
        global_batch=global_batch,
        fix=pinned,
        limit=room,
        loss=loss,
        clip=clip,
    )


def _saving(found: "SearchResult", model: str, sequence: int, cluster: str, mtbf: float) -> SaveCost:
    from fullshard.cluster.cluster import Cluster

    description = describe_costs(model, sequence, found.plan.precision.compute)
    return save_cost(found.plan, description, Cluster.load(cluster), step_seconds=found.estimate.step_seconds, mtbf=mtbf)


def _pin(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise FullshardError(f"--fix {text!r}: write KEY=VALUE, for example strategy=zero3")
    words: dict[str, object] = {"true": True, "false": False}
    return key.strip().replace("-", "_"), words.get(value, _number(value))


def _number(text: str) -> object:
    """A number, if it is one: `2`, `0.5`."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _show_found(found: "SearchResult", as_json: bool, saves: SaveCost | None) -> None:
    from fullshard.planner.search.search import summary

    if as_json:
        print_json(
            {
                "plan": found.plan.to_dict(),
                "estimate": found.estimate.to_dict(),
                "alternatives": [
                    {"label": a.label, "needed_bytes": a.needed, "step_seconds": a.step_seconds, "reason": a.reason}
                    for a in found.alternatives
                ],
                "search_seconds": found.search_seconds,
                **({"saving": asdict(saves)} if saves else {}),
            }
        )
    else:
        parts = [found.plan, found.estimate, *([saves] if saves else []), summary(found)]
        typer.echo("\n\n".join(map(str, parts)))


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
