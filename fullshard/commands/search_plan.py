"""`fullshard plan MODEL --cluster C`: search for the best plan, and show what it costs and why others lost."""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.base.callables import is_callable_name
from fullshard.base.errors import FullshardError
from fullshard.commands.common import describe_costs, print_json
from fullshard.plan.engine_traits import TRAITS
from fullshard.planner.checkpoint_interval import SaveCost, parse_mtbf, save_cost

if TYPE_CHECKING:
    from fullshard.cluster.topology import Cluster
    from fullshard.model.description import Description
    from fullshard.planner.search.search import SearchResult

Loss = StrEnum("Loss", {name: name for name in ("chunked", "plain")})  # type: ignore[misc]
option = partial(typer.Option, rich_help_panel="Search for the best plan")


@dataclass(frozen=True)
class SearchOptions:
    """Search for the best plan"""

    cluster: Annotated[
        str | None, option("--cluster", metavar="CLUSTER", help="Find the best plan for it: 64xh100, or a file of `measure`.")
    ] = None
    global_batch: Annotated[
        int | None,
        option("--global-batch", metavar="N", help="Sequences in a step, over all devices.", show_default="1 a device"),
    ] = None
    fix: Annotated[
        list[str] | None,
        option("--fix", metavar="KEY=VALUE …", help="Choices that the search keeps (remat=full home.optimizer=host …)."),
    ] = None
    limit: Annotated[str | None, option("--limit", metavar="BYTES", help="Memory of a device to use, such as 24GiB.")] = None
    mtbf: Annotated[
        str | None, option("--mtbf", metavar="TIME", help="A device fails every 50000h, 400d, 5y: say how often to save.")
    ] = None
    price: Annotated[
        float | None, option("--price", metavar="N", help="Of one device for an hour: say what a million tokens cost.")
    ] = None
    no_clip: Annotated[bool, option("--no-clip", help="Gradients are not clipped, so that no update waits for their norm.")] = (
        False
    )
    no_cache: Annotated[bool, option("--no-cache", help="Trace the model again, although its costs are kept on disk.")] = False
    loss: Annotated[
        Loss | None, option("--loss", help="How the loss is computed.", show_default="chunked; plain with --call")
    ] = None
    call: Annotated[
        str | None,
        option(
            "--call", metavar="FILE.PY:CALLABLE", help="A function (model, batch) -> logits that the model is called through."
        ),
    ] = None

    def given(self) -> list[str]:
        """The options that are set, as the command line spells them."""
        values = {k: v for k, v in vars(self).items() if k != "cluster" and v}
        return [f"--{name.replace('_', '-')}" for name in values]

    @property
    def planned_loss(self) -> str:
        """The loss that is planned for: a call's logits may differ from the head's, so with a call it is never chunked."""
        if self.call is not None and self.loss == "chunked":
            raise FullshardError("--loss chunked has no effect with --call; leave it out")
        return str(self.loss or ("plain" if self.call is not None else "chunked"))


def search(
    model: str, sequence: int, options: SearchOptions, engine: str | None = None
) -> tuple["SearchResult", SaveCost | None]:
    """The best plan for an engine, and how often to save with it where `--mtbf` asks."""
    from fullshard.base.text import parse_bytes
    from fullshard.planner.search.search import find_plan

    assert options.cluster is not None
    if engine is not None and not TRAITS[engine].traces and is_callable_name(model):
        raise FullshardError(
            f"what a step of {model} costs is known of presets and Hugging Face directories alone; name a strategy: "
            f"fullshard plan MODEL --devices N --strategy zero3 --engine {engine}"
        )
    failing = parse_mtbf(options.mtbf) if options.mtbf else None
    where, fixed = _priced(options.cluster, options.price), dict(_pin(text) for text in options.fix or [])
    limit = parse_bytes(options.limit) if options.limit else None
    compute: Any = fixed.get("compute", where.device.peak.fastest)
    tensor = fixed.get("tensor", 1)
    loss, ranks = options.planned_loss, tensor if isinstance(tensor, int) else 1
    description = describe_costs(model, sequence, compute, ranks, fresh=options.no_cache, call=options.call)
    result = find_plan(
        description,
        where,
        sequence=sequence,
        global_batch=options.global_batch,
        fix=fixed,
        limit=limit,
        loss=loss,
        clip=not options.no_clip,
        engine=engine,
    )
    return result, _saving(result, description, options.cluster, failing) if failing else None


def show_found(result: "SearchResult", saves: SaveCost | None, *, as_json: bool) -> None:
    """Print the plan, its estimate and the alternatives."""
    from fullshard.planner.search.search import summary

    if not as_json:
        parts = [result.plan, result.estimate, *([saves] if saves else []), summary(result)]
        typer.echo("\n\n".join(map(str, parts)))
        return
    print_json(
        {
            "plan": result.plan.to_dict(),
            "estimate": result.estimate.to_dict(),
            "alternatives": [
                {"label": a.label, "needed_bytes": a.needed, "step_seconds": a.step_seconds, "reason": a.reason}
                for a in result.alternatives
            ],
            "engine": result.engine,
            "search_seconds": result.search_seconds,
            **({"saving": asdict(saves)} if saves else {}),
        }
    )


def _priced(name: str, price: float | None) -> "Cluster":
    from fullshard.cluster.topology import Cluster

    cluster = Cluster.load(name)
    if price is None:
        return cluster
    if not 0 < price < float("inf"):
        raise FullshardError(f"--price is what a device costs an hour, a number above 0, not {price:g}")
    return replace(cluster, device=replace(cluster.device, price=price))


def _saving(result: "SearchResult", description: "Description", cluster: str, mtbf: float) -> SaveCost:
    from fullshard.cluster.topology import Cluster

    return save_cost(result.plan, description, Cluster.load(cluster), step_seconds=result.estimate.step_seconds, mtbf=mtbf)


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
