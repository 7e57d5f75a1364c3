"""`fullshard bench`."""

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fullshard
from fullshard.base.errors import FullshardError
from fullshard.base.status import shown
from fullshard.base.text import counted, parse_bytes, seconds_text
from fullshard.commands.common import AsJson, EngineName, print_json
from fullshard.launch.local import inside_ranks
from fullshard.plan.engine_traits import refuse_engine

if TYPE_CHECKING:
    from fullshard.observe.bench.matrix import Matrix, Wanted


def bench(
    target: Annotated[str, typer.Argument(metavar="RECIPE|MODEL", help="A TOML recipe; or a model, which is fed random tokens.")],
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE,VALUE]...", help="More choices, as after --over.")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over", metavar="KEY=VALUE,VALUE …", help="Keys of the recipe and the values to try; all combinations run."
        ),
    ] = None,
    peers: Annotated[
        str | None, typer.Option("--peers", metavar="NAMES|auto", help="Other systems to measure beside; auto: those installed.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", min=1, help="Ranks of a case.  [default: the GPUs, or 2]")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Timed steps of a case.")] = 8,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=1, help="Steps before them.")] = 3,
    seconds: Annotated[
        float,
        typer.Option("--case-seconds", metavar="SECONDS", min=1, help="The longest that a case may take, start-up included."),
    ] = 300.0,
    limit: Annotated[
        str | None, typer.Option("--limit", metavar="BYTES", help="Device memory that a rank may use, such as 24GiB.")
    ] = None,
    engine: EngineName = "torch",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="For results, one file a case.")] = Path(
        "bench/latest"
    ),
    again: Annotated[bool, typer.Option("--again", help="Run cases again that have a result in DIR.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Show the cases and their predictions, and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the combinations of some choices, each in fresh ranks, beside what the planner predicts.

    A case that runs out of memory, fails or takes too long is a row with the reason. Results are kept in DIR: the same command
    goes on where an earlier one ended.

    Example: fullshard bench llama-bytes --over strategy=ddp,zero2,zero3 remat=none,full sequence=128 micro_batch=8

    Example: fullshard bench recipes/bytes.toml --over home.optimizer=device,host --peers fully_shard,ddp -o bench/homes
    """
    from fullshard.observe.bench.matrix import Wanted

    refuse_engine(engine)
    if inside_ranks():
        raise FullshardError("`fullshard bench` starts ranks of its own; run it outside torchrun and srun")
    names = tuple(name.strip() for name in (peers or "").split(",") if name.strip() and name.strip() != "none")
    command = shlex.join(["fullshard", *sys.argv[1:]])
    nbytes = parse_bytes(limit) if limit is not None else None
    wanted = Wanted(target, (*(over or []), *(more or [])), names, engine, ranks, steps, warmup, seconds, nbytes, output, command)
    if dry:
        _show_predictions(wanted, as_json)
    else:
        _run(wanted, again, as_json)


def _make(wanted: "Wanted", directory: Path) -> "Matrix":
    with shown("reading the cases"):
        from fullshard.observe.bench.matrix import make_matrix

        return make_matrix(wanted, fullshard.__version__, directory)


def _show_predictions(wanted: "Wanted", as_json: bool) -> None:
    from fullshard.observe.bench.matrix import predictions, predictions_dict

    with tempfile.TemporaryDirectory() as scratch:
        matrix = _make(wanted, Path(scratch))
    if as_json:
        print_json(predictions_dict(matrix))
    else:
        typer.echo(predictions(matrix))


def _run(wanted: "Wanted", again: bool, as_json: bool) -> None:
    from fullshard.observe.bench import report
    from fullshard.observe.bench.case_progress import CaseProgress
    from fullshard.observe.bench.matrix import finished, run_matrix, unfinished, write_files
    from fullshard.observe.bench.run_cases import CaseFiles

    _refuse_output(wanted.output)
    matrix = _make(wanted, wanted.output / "data")
    count, left = len(matrix.cases), unfinished(matrix.cases, CaseFiles(wanted.output), wanted.seconds)
    todo = sum(not c.refused for c in matrix.cases) if again else left
    cases, ranks = counted(count, "case"), counted(matrix.settings.ranks, "rank")
    about = f"{cases} on {ranks}, {todo} to run, each within {seconds_text(wanted.seconds)}"
    typer.echo(f"{about}; results go to {wanted.output}", err=True)
    try:
        with CaseProgress(count, matrix.axes) as progress:
            results = run_matrix(matrix, again=again, tell=progress.tell)
    except KeyboardInterrupt:
        part = finished(matrix)
        if part.measured():
            write_files(part, wanted.output)
        typer.echo(f"ended; {wanted.output} has {len(part.results)} of {cases}, and the same command runs the others", err=True)
        raise
    files, missing = write_files(results, wanted.output)
    if as_json:
        print_json(report.to_dict(results))
    else:
        typer.echo(report.text(results))
    typer.echo("\n".join([*([missing] if missing else []), f"written: {', '.join(map(str, files))}"]), err=True)
    if not results.measured():
        raise typer.Exit(1)


def _refuse_output(path: Path) -> None:
    """Raise where no results can be written."""
    if path.exists() and not path.is_dir():
        raise FullshardError(f"--output {path} is a file; write a directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FullshardError(f"cannot make {path}: {error.strerror}; write another --output") from None
    if not os.access(path, os.W_OK):
        raise FullshardError(f"cannot write to {path}; write another --output")
