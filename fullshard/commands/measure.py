"""`fullshard measure`: this machine as a cluster file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fullshard.base.errors import FullshardError
from fullshard.commands.common import AsJson, EngineName
from fullshard.engine.engine import load_engine


def measure(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the cluster.")] = Path(
        "cluster.json"
    ),
    disk: Annotated[
        Path | None,
        typer.Option("--disk", metavar="DIR", help="The directory whose disk is timed.", show_default="temporary files"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A rougher look, in seconds.")] = False,
    engine: EngineName = "torch",
    as_json: AsJson = False,
) -> None:
    """Time this machine (matrix products, memory, PCIe, disk, collectives) into a cluster file for `plan --cluster`.

    Under torchrun all ranks take part, and collectives are timed as well.

    Example: fullshard measure -o cluster.json && fullshard plan llama-125m --cluster cluster.json
    """
    timing = load_engine(engine)
    if not output.parent.is_dir():
        raise FullshardError(f"{output.parent} is no directory; write the cluster into one that exists")
    cluster = timing.machine.measure(disk, quick, _say if sys.stderr.isatty() else lambda part: None)
    try:
        first = timing.ranks.is_first()
    except (RuntimeError, ValueError):  # no ranks: this process alone
        first = True
    if first:
        cluster.save(output)
        typer.echo(cluster.to_json() if as_json else f"{cluster}\n\nwritten to {output}", nl=not as_json)


def _say(part: str) -> None:
    typer.echo(f"timing: {part}", err=True)
