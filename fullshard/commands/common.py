"""What several commands share: arguments, and how to print."""

import gc
import json
from functools import partial
from typing import Annotated, Any

import typer

from fullshard.base.callables import is_callable_name
from fullshard.base.errors import FullshardError
from fullshard.base.reading import is_directory, is_plain_file
from fullshard.base.status import say, shown
from fullshard.engine.engine import Engine, load_engine
from fullshard.model import presets
from fullshard.model.description import Description
from fullshard.model.description_cache import cached_description
from fullshard.plan.engine_traits import DEFAULT_ENGINE, ENGINES
from fullshard.plan.plan import DType

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A preset, a Hugging Face directory, or file.py:callable.")]
EngineName = Annotated[str, typer.Option("--engine", metavar="|".join(ENGINES), help="What carries the plan out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
unit_option = partial(typer.Option, rich_help_panel="Units by hand")
Classes = Annotated[list[str] | None, unit_option("--class", metavar="NAME", help="Each module of this class is a unit.")]
Names = Annotated[
    list[str] | None, unit_option("--names", metavar="PATTERN", help="Each module of this path is a unit (wildcards).")
]
MinParams = Annotated[int, unit_option("--min-params", metavar="N", help="Each module with at least N parameters is a unit.")]


def describe_model(
    model: str,
    classes: list[str] | None,
    names: list[str] | None,
    min_params: int,
    experts: bool = False,
    *,
    engine: str = DEFAULT_ENGINE,
) -> Description:
    """The units of MODEL: from a preset's size where that is enough, else from the module itself."""
    if model in presets.PRESETS and not (classes or names or min_params or experts):
        return presets.describe(model)
    with shown(f"reading {model}"):
        used, built = _load(model, repr(model), engine=engine)
        rules = {"classes": classes or (), "names": names or (), "min_params": min_params, "experts": experts}
        return used.model.describe(built, **rules, title=model)  # type: ignore[arg-type]


def describe_costs(
    model: str, sequence: int, compute: DType, tensor: int = 1, *, fresh: bool = False, call: str | None = None
) -> Description:
    """As `describe_model`, with the costs of computing it. Presets ship them; other models, and ranks of a `tensor` axis, are
    traced. Costs of Hugging Face directories are kept on disk; `fresh` traces them again. `call`: file.py:callable, which the
    model is called through; its costs are not kept, since its code may change.
    """
    if call is not None and not is_callable_name(call):
        raise FullshardError(f"--call {call} names no callable; write --call file.py:callable")
    if model in presets.PRESETS and tensor == 1 and call is None:
        described = presets.describe(model)
        traced = "bf16" if compute == "fp16" else compute  # traced as one
        if described.costs is not None and any(key[0] == traced for key in described.costs.traces):
            return described
    axes = (tensor,) if tensor > 1 else ()

    def trace() -> Description:
        engine, found = _load(model, f"tensor = {tensor}" if tensor > 1 else repr(model), call)
        assert engine.model.trace_costs is not None
        return engine.model.trace_costs(found, micro_batch=1, sequence=sequence, compute=compute, title=model, tensor=axes)

    with shown(f"reading {model}"):
        if call is not None:
            return trace()
        return cached_description(model, sequence=sequence, compute=compute, tensor=axes, make=trace, fresh=fresh)


def _load(model: str, why: str, call: str | None = None, engine: str = DEFAULT_ENGINE) -> tuple[Engine[Any, Any], Any]:
    """The engine and the model. Nothing that importing and building make is garbage, so Python does not look for it: that takes
    a seventh of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        used = _engine(model, why, engine)
        say(f"building {model}")
        return used, used.model.load(model, call=call)
    finally:
        if collects:
            gc.enable()


def _engine(model: str, why: str, engine: str) -> Engine[Any, Any]:
    """The engine; a model that is none is refused before it is needed for nothing."""
    if not (model in presets.PRESETS or ":" in model or is_directory(model) or is_plain_file(model)):
        presets.preset(model)
    say(f"importing {engine}")
    return load_engine(engine, why)


def print_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=1))
