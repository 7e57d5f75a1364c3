"""`fullshard checkpoint`: looking at checkpoints, and turning them into other things. No GPU, no ranks."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text, count_text, table
from fullshard.commands.common import AsJson, print_json

if TYPE_CHECKING:
    from fullshard.checkpoint.directories import Place

app = typer.Typer(help="Look at checkpoints, verify, compare, convert and clean them up.", no_args_is_help=True)

Where = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint, a directory of them (the newest is meant), or a run; or a URL.")
]
CheckpointDir = Annotated[str, typer.Argument(metavar="PATH", help="A directory of checkpoints, or a run; or a URL.")]


@app.command("ls")
def ls(path: CheckpointDir, as_json: AsJson = False) -> None:
    """List the checkpoints of a run."""
    from fullshard.checkpoint import commit

    checkpoint_dir = commit.find_checkpoint_dir(path)
    rows = [_about(checkpoint_dir, name) for name in commit.committed(checkpoint_dir)]
    dead, held = commit.garbage(checkpoint_dir)
    if not (rows or dead or held):
        raise FullshardError(f"{path} has no checkpoints; give a run, or its directory of checkpoints")
    if as_json:
        print_json({"checkpoints": rows, "partial": dead, "being_written": held})
        return
    lines = [
        [r["name"], "damaged", "", "", r["damaged"]]
        if r["damaged"]
        else [r["name"], r["created"], bytes_text(r["bytes"]), str(r["cursor"]), r["metrics"]]
        for r in rows
    ]
    typer.echo(table(["checkpoint", "written", "size", "samples", "metrics"], lines, right=(2, 3)))
    for name in held:
        typer.echo(f"{name} is being written", err=True)
    if dead:
        typer.echo(f"{len(dead)} partial ones; `fullshard checkpoint gc {path}` removes them", err=True)


def _about(checkpoint_dir: Any, name: str) -> dict[str, Any]:
    """A row of `ls`. `damaged` says what the manifest and the file sizes show to be wrong, or is None."""
    from fullshard.checkpoint import commit
    from fullshard.checkpoint.pruning import visible_problems

    row = {"name": name, "step": commit.step_of(name), "created": None, "bytes": None, "cursor": None, "metrics": ""}
    if wrong := visible_problems(checkpoint_dir.child(name)):
        return row | {"damaged": wrong[0]}
    manifest = commit.read_manifest(checkpoint_dir.child(name))
    written = datetime.fromtimestamp(manifest.created, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    metrics = "  ".join(f"{k} {v:.4f}" for k, v in manifest.metrics.items())
    read = {"step": manifest.step, "created": written, "bytes": manifest.nbytes, "cursor": manifest.cursor, "metrics": metrics}
    return row | read | {"damaged": None}


@app.command("show")
def show(
    path: Where,
    tensors: Annotated[
        str, typer.Option("--tensors", metavar="PATTERN", help="Only tensors of this name (wildcards).")
    ] = "model.*",
    values: Annotated[bool, typer.Option("--values/--no-values", help="Read them: mean, deviation, range, NaN.")] = True,
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint holds: its tensors with shape, dtype and statistics."""
    from fnmatch import fnmatchcase

    from fullshard.checkpoint.compare import statistics
    from fullshard.checkpoint.reader import count_elements, open_checkpoint

    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest
    names = [n for n in manifest.tensors if fnmatchcase(n, tensors)]
    if not names:
        example = next(iter(manifest.tensors), "none at all")
        raise FullshardError(f"{checkpoint.place} has no tensor called {tensors!r}; it has, for example, {example}")
    read = {n: statistics(checkpoint, n) if values else None for n in names}
    if as_json:
        rows = {n: {"shape": manifest.tensors[n].shape, "dtype": manifest.tensors[n].dtype} for n in names}
        print_json({n: row | (dataclasses.asdict(s) if (s := read[n]) else {}) for n, row in rows.items()})
        return
    lines = [[n, str(list(manifest.tensors[n].shape)), manifest.tensors[n].dtype, *_cells(read[n])] for n in names]
    head = ["tensor", "shape", "dtype", *(["mean", "std", "lowest", "highest", "NaN", "inf"] if values else [])]
    typer.echo(table(head, [line[: len(head)] for line in lines], right=range(3, len(head))))
    elements = count_text(count_elements([t for n, t in manifest.tensors.items() if n.startswith("model.")]))
    size = f"{elements} weights, {bytes_text(manifest.nbytes)} in {len(manifest.files)} files"
    typer.echo(f"step {manifest.step}, {size}: {checkpoint.place}", err=True)


def _cells(s: Any) -> list[str]:
    return [f"{s.mean:.3g}", f"{s.std:.3g}", f"{s.low:.3g}", f"{s.high:.3g}", str(s.nans), str(s.infinities)] if s else [""] * 6


@app.command("verify")
def verify(
    path: Where, every: Annotated[bool, typer.Option("--all", help="All checkpoints of PATH, not the newest alone.")] = False
) -> None:
    """Read every byte and compare it with the checksums. Exits with 1 if anything is wrong."""
    from fullshard.checkpoint import commit
    from fullshard.checkpoint.verify import problems

    checkpoint_dir = commit.find_checkpoint_dir(path)
    places = [checkpoint_dir.child(n) for n in commit.committed(checkpoint_dir)] if every else [commit.find(path)]
    if not places:
        raise FullshardError(f"{path} has no checkpoints")
    checked = [(place, problems(place)) for place in places]
    for place, wrong in checked:
        typer.echo("\n".join(wrong) if wrong else f"{place}: whole")
    if any(wrong for _, wrong in checked):
        raise typer.Exit(1)


@app.command("diff")
def diff(
    first: Where,
    second: Annotated[str, typer.Argument(metavar="OTHER", help="The one to compare with.")],
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints tensor by tensor. Exits with 1 if they differ."""
    from fullshard.checkpoint.compare import differences, field_differences
    from fullshard.checkpoint.reader import open_checkpoint

    a, b = open_checkpoint(first), open_checkpoint(second)
    diffs = list(differences(a, b))
    if as_json:
        print_json([dataclasses.asdict(d) for d in diffs])
    else:
        for line in field_differences(a, b):
            typer.echo(line, err=True)
        rows = [[d.name, d.kind, d.detail, "" if d.largest is None else f"{d.largest:.3g}", str(d.changed or "")] for d in diffs]
        head = ["tensor", "differs in", "", "by at most", "elements"]
        typer.echo(table(head, rows, right=(3, 4)) if rows else "the tensors are the same, bit for bit")
    if diffs:
        raise typer.Exit(1)


@app.command("gc")
def gc(
    path: CheckpointDir,
    keep: Annotated[
        int,
        typer.Option("--keep", metavar="N", min=0, help="Also remove all but the newest N whole ones.", show_default="all stay"),
    ] = 0,
    dry: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove what killed runs left behind: partial checkpoints and files. What is being written stays.

    With --keep N, all but the newest N whole checkpoints go, too; those that stay are compared with their checksums first.
    """
    from fullshard.checkpoint import commit
    from fullshard.checkpoint.directories import Local, open_place

    run, checkpoint_dir = open_place(path), commit.find_checkpoint_dir(path)
    if isinstance(run, Local) and not commit.is_locked(run.path):
        for name in commit.partial_files(run):
            typer.echo(name)
            if not dry:
                commit.remove_leftover(run, name)
    with nullcontext() if dry else _lease(checkpoint_dir, keep):
        _collect(checkpoint_dir, keep, dry)


@contextmanager
def _lease(checkpoint_dir: "Place", keep: int) -> Iterator[None]:
    """The lease of the directory, taken only if there is something to remove. While a run holds it, only abandoned files go."""
    from fullshard.checkpoint import commit
    from fullshard.checkpoint.directories import Local
    from fullshard.checkpoint.lease import read_leases, take_lease

    if not (keep or checkpoint_dir.uploads() or any(commit.garbage(checkpoint_dir)) or read_leases(checkpoint_dir)):
        yield
        return
    try:
        lease = take_lease(checkpoint_dir, "fullshard checkpoint gc")
    except FullshardError:
        if keep or not isinstance(checkpoint_dir, Local):  # there a live process has locked what it writes
            raise
        yield
        return
    try:
        yield
    finally:
        lease.release()


def _collect(checkpoint_dir: "Place", keep: int, dry: bool) -> None:
    from fullshard.checkpoint import commit
    from fullshard.checkpoint.pruning import Inventory
    from fullshard.checkpoint.retention import Retention

    dead, held = commit.garbage(checkpoint_dir)
    known = Inventory.of(checkpoint_dir) if keep > 0 else Inventory(checkpoint_dir)
    old = known.removable(Retention(last=keep))
    for name in [*dead, *old]:
        typer.echo(name)
        if not dry:
            commit.remove(checkpoint_dir, name) if name in old else commit.remove_leftover(checkpoint_dir, name)
    for upload in checkpoint_dir.uploads():
        typer.echo(f"{upload[0]}, an upload that was not finished")
        if not dry:
            checkpoint_dir.abort(upload)
    for name, why in known.damaged.items():
        typer.echo(f"{name} stays and does not count: {why}", err=True)
    for name in held:
        typer.echo(f"{name} is being written and stays", err=True)


@app.command("average")
def average(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Two checkpoints or more.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The directory to put the checkpoint into.")],
) -> None:
    """Write the mean of the weights of several checkpoints, without optimizer state."""
    from fullshard.checkpoint.average import average
    from fullshard.checkpoint.directories import Local

    typer.echo(str(average(paths, Local(output))))


@app.command("can-resume")
def can_resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.")],
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", min=1, help="For this many ranks.", show_default="as here")
    ] = None,
) -> None:
    """Say whether a run can go on with N ranks, without starting any. Exits with 1 if it cannot."""
    from fullshard.engine.engine import load_engine
    from fullshard.runs.resuming import resumable
    from fullshard.runs.run_directory import engine_of_run

    load_engine(engine_of_run(run), f"can-resume {run}")  # without it the answer is neither yes nor no
    try:
        typer.echo(f"yes: {resumable(run, ranks)}")
    except FullshardError as error:
        typer.echo(f"no: {error}")
        raise typer.Exit(1) from None


class Format(StrEnum):
    """What other programs read."""

    hf = "hf"
    torch = "torch"
    orbax = "orbax"
    peft = "peft"


@app.command("export")
def export(
    path: Where,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="The directory, or for torch the file, to make.")
    ],
    form: Annotated[
        Format, typer.Option("--format", help="hf: safetensors and config; torch: one .pt; orbax: for JAX; peft: adapters.")
    ] = Format.hf,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="DIR", help="Where config and tokenizer are copied from.", show_default="the run's model"
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="bf16, fp16 or fp32.", show_default="as the original, or fp32")
    ] = None,
) -> None:
    """Turn a checkpoint's weights into what other programs read, a tensor at a time.

    Example: fullshard checkpoint export runs/first -o model --config llama/
    """
    from fullshard.checkpoint.other_formats.export import export

    typer.echo(str(export(path, output, str(form), config, dtype)))


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(metavar="PATH", help="A DCP directory, .pt file(s), DeepSpeed, Hugging Face, Orbax.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The directory to put the checkpoint into.")],
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, help="The step to note down.")] = 0,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", help="What the weights' names begin with there; it is cut off.")
    ] = "",
) -> None:
    """Make a checkpoint of somebody else's weights. Nothing in them is executed.

    Example: fullshard checkpoint import global_step100 -o imported
    """
    from fullshard.checkpoint.commit import read_manifest
    from fullshard.checkpoint.directories import Local
    from fullshard.checkpoint.other_formats.import_weights import import_weights

    made = import_weights(source, Local(output), step, prefix)
    if unchecked := read_manifest(made).state.get("unchecked"):
        said = f"{unchecked[0]} and {len(unchecked) - 1} more carry" if len(unchecked) > 1 else f"{unchecked[0]} carries"
        option = " (torch.serialization.set_crc32_options)" if unchecked[0].endswith((".pt", ".pth", ".distcp")) else ""
        typer.echo(f"{said} no checksums{option}: damage to it cannot be found", err=True)
    typer.echo(str(made))
