"""`fullshard migrate`."""

from pathlib import Path
from typing import Annotated

import typer

from fullshard.base.errors import FullshardError


def migrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A DeepSpeed, Accelerate or torchtitan file, or an FSDP script.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values of the recipe, such as model.name=gpt2.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the recipe to FILE.  [default: print it]")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="deepspeed|accelerate|torchtitan|fsdp", help="What FILE is.  [default: found]")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="Ranks that FILE is for, where it does not say.")
    ] = None,
) -> None:
    """Make a recipe from another system's configuration. What is not carried over is listed; no code of FILE runs.

    Example: fullshard migrate ds_config.json -o recipe.toml

    Example: fullshard migrate fsdp.yaml model.name=path/to/model data.path=tokens -o recipe.toml
    """
    from fullshard.runs.migrate.config_kinds import migrate

    if output is not None and output.exists():
        raise FullshardError(f"{output} exists; write another name, or remove it")
    made = migrate(file, kind, ranks, overrides or [])
    typer.echo(made.report, err=True)
    if output is None:
        typer.echo(made.recipe, nl=False)
        return
    output.write_text(made.recipe)
    typer.echo(f"wrote {output}; next: fullshard train {output} --dry-run", err=True)
