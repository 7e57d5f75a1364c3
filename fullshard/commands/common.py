"""What several commands share: arguments, and how to print."""

import json
from typing import Annotated

import typer

from fullshard.engine import ENGINES, load_engine
from fullshard.model import presets
from fullshard.model.description import Description
from fullshard.plan import DType
from fullshard.reading import is_directory, is_plain_file

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A preset, a Hugging Face directory, or file.py:callable.")]
EngineName = Annotated[str, typer.Option("--engine", metavar="|".join(ENGINES), help="What carries the plan out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Classes = Annotated[list[str] | None, typer.Option("--class", metavar="NAME", help="Each module of this class is a unit.")]
Names = Annotated[
    list[str] | None, typer.Option("--names", metavar="PATTERN", help="Each module of this path is a unit (wildcards).")
]
MinParams = Annotated[int, typer.Option(metavar="N", help="Each module with at least N parameters is a unit.")]


def describe_model(model: str, classes: list[str] | None, names: list[str] | None, min_params: int) -> Description:
    """The units of MODEL: from a preset's size where that is enough, else from the module itself."""
    if model in presets.PRESETS and not (classes or names or min_params):
        return presets.describe(model)
    if not (model in presets.PRESETS or ":" in model or is_directory(model) or is_plain_file(model)):
        presets.preset(model)  # refuses, with the nearest name, before torch is needed for nothing
    engine = load_engine("torch", repr(model))
    found = engine.load_model(model)
    return engine.describe(found, classes=classes or (), names=names or (), min_params=min_params, title=model)


def describe_costs(model: str, sequence: int, compute: DType, tensor: int = 1) -> Description:
    """As `describe_model`, with the costs of computing it. Presets ship them; other models, and ranks of a `tensor` axis, are
    traced.
    """
    described = describe_model(model, None, None, 0)
    if tensor == 1 and described.costs is not None and any(key[0] == compute for key in described.costs.traces):
        return described
    engine = load_engine("torch", f"tensor = {tensor}" if tensor > 1 else repr(model))
    axes = (tensor,) if tensor > 1 else ()
    found = engine.load_model(model)
    return engine.describe(found, micro_batch=1, sequence=sequence, compute=compute, title=model, tensor=axes)


def print_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=1))
