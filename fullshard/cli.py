"""The command line: parses, calls one function, prints. Data on stdout, the rest on stderr.

Nothing here imports torch or jax at the top: `--help` must be quick, and presets need neither.
"""

import json
import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fullshard
from fullshard import presets
from fullshard.description import Description
from fullshard.errors import FullshardError
from fullshard.launch.local import given_arguments, inside_ranks
from fullshard.plan import Batch, Plan, Precision, Prefetch
from fullshard.strategies import STRATEGIES, choose

if TYPE_CHECKING:
    from fullshard.data import TokenFile
    from fullshard.data.sources import Source

app = typer.Typer(
    name="fullshard",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="""Train models that do not fit on one device.

    How a model is sharded is a value, the plan: print it, diff it, store it, carry it out.

    MODEL is a preset (llama3-8b, gpt2 …; `fullshard models` lists them), a directory with a Hugging Face
    config.json, or file.py:callable / package.module:callable that returns a module.
    """,
    epilog="Completion for your shell: fullshard --install-completion",
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A preset, a Hugging Face directory, or file.py:callable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Classes = Annotated[list[str] | None, typer.Option("--class", metavar="NAME", help="Each module of this class is a unit.")]
Names = Annotated[
    list[str] | None, typer.Option("--names", metavar="PATTERN", help="Each module of this path is a unit (wildcards).")
]
MinParams = Annotated[int, typer.Option(metavar="N", help="Each module with at least N parameters is a unit.")]

Strategy = StrEnum("Strategy", {name: name for name in STRATEGIES})  # type: ignore[misc]
Remat = StrEnum("Remat", {name: name for name in ("none", "selective", "full")})  # type: ignore[misc]
Sync = StrEnum("Sync", {name: name for name in ("every", "last")})  # type: ignore[misc]
DType = StrEnum("DType", {name: name for name in ("fp32", "bf16", "fp16")})  # type: ignore[misc]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(fullshard.__version__)
        raise typer.Exit


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the presets and their sizes."""
    from fullshard.text import count_text, table

    found = {name: presets.describe(name) for name in presets.PRESETS}
    if as_json:
        _print_json({name: {"parameters": d.numel, "units": len(d.units)} for name, d in found.items()})
        return
    rows = [[n, count_text(d.numel), str(presets.PRESETS[n].layers), str(presets.PRESETS[n].dim)] for n, d in found.items()]
    typer.echo(table(["preset", "parameters", "layers", "dim"], rows, right=(1, 2, 3)))


@app.command()
def units(model: Model, classes: Classes = None, names: Names = None, min_params: MinParams = 0, as_json: AsJson = False) -> None:
    """Show which modules of MODEL gather, compute and free together.

    Blocks that repeat are found by themselves; --class, --names or --min-params choose them by hand.
    """
    description = _describe(model, classes, names, min_params)
    if as_json:
        _print_json(description.to_dict())
    else:
        typer.echo(str(description))


@app.command()
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
        _describe(model, classes, names, min_params),
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


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes to the recipe.")
    ] = None,
    run: Annotated[Path, typer.Option("--run", metavar="DIR", help="The run's directory.")] = Path("runs/latest"),
    ranks: Annotated[int | None, typer.Option(metavar="N", help="Ranks on this machine.  [default: its GPUs, or 2]")] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, and stop.")] = False,
) -> None:
    """Train what a recipe says, on all GPUs of this machine or on 2 CPU ranks.

    Under an outer torchrun or srun it joins the ranks that are there.

    Example: fullshard train recipes/bytes.toml train.steps=200 optim.lr=1e-3 --run runs/first
    """
    try:
        from fullshard import on_torch
    except ImportError as error:
        raise FullshardError(f"training needs torch ({error}); pip install 'fullshard[torch]'") from None
    from fullshard.launch.local import become_ranks
    from fullshard.train.metrics import refuse_sinks
    from fullshard.train.prepare import prepare
    from fullshard.train.recipe import load_recipe
    from fullshard.train.run import execute, refuse_run

    loaded = load_recipe(recipe, overrides or [])
    refuse_sinks(loaded)
    inside = on_torch.adopt_slurm() or inside_ranks()
    prepared = prepare(loaded, _world() if inside else ranks)
    if inside:
        try:
            execute(prepared, run)
        finally:
            on_torch.finish()
        return
    refuse_run(run)
    weights = f"weights from {prepared.weights}" if prepared.weights else "weights drawn"
    typer.echo(f"{loaded.model_dump_json(indent=1)}\n\n{prepared.plan}\n\n{weights}; {loaded.steps} steps into {run}", err=True)
    if not dry:
        become_ranks(prepared.plan.mesh.devices, ["train", str(recipe), *(overrides or []), "--run", str(run)])


def _world() -> int:
    return int(os.environ["WORLD_SIZE"])


data_app = typer.Typer(help="Make and look at token files, the data that training reads.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("pack")
def data_pack(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The directory to make.")],
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="INPUT", help="Files (.txt .md .py .jsonl .parquet), or directories of them."),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A Hugging Face dataset: a name on the hub, a save_to_disk directory, or files."),
    ] = None,
    subset: Annotated[str | None, typer.Option(metavar="NAME", help="--dataset: its configuration.")] = None,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="--dataset: its split.", show_default="train")] = None,
    tokenizer: Annotated[
        str, typer.Option(metavar="PATH", help="A Hugging Face tokenizer.json, a directory with one, or bytes.")
    ] = "bytes",
    end: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="The token that ends a document; found by itself if common.")
    ] = None,
    field: Annotated[
        str | None, typer.Option(metavar="NAME", help="What holds the text, or the messages.", show_default="text, or found")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Records are conversations; only answers are to be predicted.")] = False,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="--chat: a Jinja template.", show_default="the tokenizer's")
    ] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Processes that tokenise.", show_default="all cores")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise text into a directory of token files. The result does not depend on the number of workers.

    Example: fullshard data pack corpus/ -o tokens --tokenizer llama/tokenizer.json

    Example: fullshard data pack chat.jsonl -o tokens --chat --tokenizer llama/
    """
    from fullshard.data.pack import pack
    from fullshard.train.progress import counter

    options = {"end": end, "field": field, "chat": chat, "template": template, "workers": workers}
    with counter("documents", "tokens") as count:
        made = pack(_data_sources(inputs, dataset, subset, split), output, tokenizer=tokenizer, progress=count, **options)  # type: ignore[arg-type]
    _show_tokens(made, as_json)


def _data_sources(inputs: list[Path] | None, dataset: str | None, subset: str | None, split: str | None) -> "list[Source]":
    from fullshard.data.sources import HubDataset

    if dataset is None:
        for option, given in (("subset", subset), ("split", split)):
            if given is not None:
                raise FullshardError(f"--{option} has no effect without --dataset; add --dataset NAME, or leave it out")
        if not inputs:
            raise FullshardError("there is nothing to pack; give files or directories, or --dataset NAME")
        return [*inputs]
    return [*(inputs or []), HubDataset(dataset, subset, split)]


@data_app.command("show")
def data_show(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that `data pack` made.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare the checksums.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a directory of token files holds."""
    from fullshard.data import TokenFile

    found = TokenFile(path)
    if verify:
        found.verify()
    _show_tokens(found, as_json)


def _show_tokens(found: "TokenFile", as_json: bool) -> None:
    facts = {
        "path": str(found.path),
        "tokens": len(found),
        "documents": found.documents,
        "shards": len(found.shards),
        "vocab": found.vocab,
        "dtype": found.dtype.name,
        "tokenizer": found.tokenizer,
        **({"answers": found.answers} if found.has_answers else {}),
    }
    if as_json:
        _print_json(facts)
    else:
        typer.echo(
            "\n".join(f"{key:<10} {value:,}" if isinstance(value, int) else f"{key:<10} {value}" for key, value in facts.items())
        )


@app.command()
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
        _print_json(lines)
    else:
        typer.echo("\n".join(lines) or "the two plans are the same")


def _spell(field: str, *value: object) -> str:
    """A field of a strategy as this command's option."""
    return " ".join(["--" + field.replace("_", "-"), *map(str, value)])


def _describe(model: str, classes: list[str] | None, names: list[str] | None, min_params: int) -> Description:
    """From a preset's size where that is enough, from the module itself where it is not."""
    if model in presets.PRESETS and not (classes or names or min_params):
        return presets.describe(model)
    if not (model in presets.PRESETS or ":" in model or Path(model).exists()):
        presets.preset(model)  # refuses, with the nearest name, before torch is needed for nothing
    try:
        from fullshard import on_torch
    except ImportError as error:
        raise FullshardError(f"{model!r} needs torch ({error}); pip install 'fullshard[torch]', or use a preset") from None
    found = on_torch.load_model(model)
    return on_torch.describe(found, classes=classes or (), names=names or (), min_params=min_params, title=model)


def _write(path: Path, made: Plan) -> None:
    try:
        made.save(path)
    except OSError as error:
        raise FullshardError(f"cannot write {path}: {error.strerror}") from None
    typer.echo(f"plan written to {path}", err=True)


def _print_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=1))


def main() -> None:
    """The entry point: a refusal, ours or the parser's, is one sentence on stderr and exit code 2."""
    try:
        sys.exit(app(given_arguments(), standalone_mode=False))
    except FullshardError as error:
        _refuse(str(error))
    except Exception as error:
        # typer carries a click of its own in some versions and uses the installed one in others.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(2)  # the help has been printed
        _refuse(f"{error.format_message().strip().rstrip('.').replace(chr(10), ' ')}; see --help")


def _refuse(sentence: str) -> None:
    # What all ranks find is said once: the launcher ends the others when the first rank has spoken.
    if os.environ.get("RANK", "0") != "0":
        time.sleep(2)
    typer.echo(f"error: {sentence}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
