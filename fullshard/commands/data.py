"""`fullshard data`: making token files, and looking at them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.base.errors import FullshardError
from fullshard.commands.common import AsJson, print_json

if TYPE_CHECKING:
    from fullshard.data import TokenFile
    from fullshard.data.sources import DataSource

app = typer.Typer(help="Make and look at token files, the data that training reads.", no_args_is_help=True)


@app.command("pack")
def pack(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The directory to make.")],
    inputs: Annotated[
        list[Path] | None, typer.Argument(metavar="INPUT", help="Files (.txt .md .py .jsonl .parquet), or directories of them.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset", metavar="NAME", help="A Hugging Face dataset: a name on the hub, a save_to_disk directory, or files."
        ),
    ] = None,
    subset: Annotated[str | None, typer.Option("--subset", metavar="NAME", help="--dataset: its configuration.")] = None,
    split: Annotated[
        str | None, typer.Option("--split", metavar="NAME", help="--dataset: its split.", show_default="train")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="PATH", help="A Hugging Face tokenizer.json, a directory with one, or bytes.")
    ] = "bytes",
    end: Annotated[
        str | None, typer.Option("--end", metavar="TOKEN", help="The token that ends a document; found by itself if common.")
    ] = None,
    field: Annotated[
        str | None,
        typer.Option("--field", metavar="NAME", help="What holds the text, or the messages.", show_default="text, or found"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Records are conversations; only answers are to be predicted.")] = False,
    template: Annotated[
        Path | None, typer.Option("--template", metavar="FILE", help="--chat: a Jinja template.", show_default="the tokenizer's")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", min=1, help="Processes that tokenise.", show_default="all cores")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise text into a directory of token files. The result does not depend on the number of workers.

    Example: fullshard data pack corpus/ -o tokens --tokenizer llama/tokenizer.json

    Example: fullshard data pack chat.jsonl -o tokens --chat --tokenizer llama/
    """
    from fullshard.data.pack_tokens import pack
    from fullshard.runs.progress import counter

    options = {"end": end, "field": field, "chat": chat, "template": template, "workers": workers}
    with counter("documents", "tokens") as count:
        made = pack(_data_sources(inputs, dataset, subset, split), output, tokenizer=tokenizer, progress=count, **options)  # type: ignore[arg-type]
    _show_tokens(made, as_json)


def _data_sources(inputs: list[Path] | None, dataset: str | None, subset: str | None, split: str | None) -> "list[DataSource]":
    from fullshard.data.sources import HubDataset

    if dataset is None:
        for option, given in (("subset", subset), ("split", split)):
            if given is not None:
                raise FullshardError(f"--{option} has no effect without --dataset; add --dataset NAME, or leave it out")
        if not inputs:
            raise FullshardError("there is nothing to pack; give files or directories, or --dataset NAME")
        return [*inputs]
    return [*(inputs or []), HubDataset(dataset, subset, split)]


@app.command("show")
def show(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that `data pack` made.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare the checksums.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a directory of token files holds."""
    from fullshard.data import TokenFile

    tokens = TokenFile(path)
    if verify:
        tokens.verify()
    _show_tokens(tokens, as_json)


def _show_tokens(tokens: "TokenFile", as_json: bool) -> None:
    facts = {
        "path": str(tokens.path),
        "tokens": len(tokens),
        "documents": tokens.documents,
        "shards": len(tokens.shards),
        "vocab": tokens.vocab,
        "dtype": tokens.dtype.name,
        "tokenizer": tokens.tokenizer,
        **({"answers": tokens.answers} if tokens.has_answers else {}),
    }
    if as_json:
        print_json(facts)
    else:
        typer.echo(
            "\n".join(f"{key:<10} {value:,}" if isinstance(value, int) else f"{key:<10} {value}" for key, value in facts.items())
        )
