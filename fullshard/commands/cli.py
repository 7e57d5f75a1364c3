"""The command line: parses, calls one function, prints. Data on stdout, the rest on stderr.

Nothing here imports torch or jax at the top: `--help` must be quick, and presets need neither.
"""

import io
import os
import re
import signal
import sys
from typing import Annotated

import typer

import fullshard
from fullshard.base.errors import REFUSED, FullshardError
from fullshard.commands import checkpoint, data, plan
from fullshard.commands.bench import bench
from fullshard.commands.compare import compare
from fullshard.commands.measure import measure
from fullshard.commands.migrate import migrate
from fullshard.commands.page import page
from fullshard.commands.profile import profile
from fullshard.commands.train import train
from fullshard.launch.local import given_arguments, inside_ranks
from fullshard.launch.rank_end import end_rank

HALF = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")  # of a surrogate pair; others stand for bytes of a file's name

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
for command in (plan.models, plan.units, plan.explain, compare, measure, train, profile, bench, page, migrate):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True})(plan.plan)  # of --fix, which takes several
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(fullshard.__version__)
        raise typer.Exit


def main() -> None:
    """The entry point. Bad input ends in one sentence on stderr and its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be no text
    try:
        refuse_arguments(arguments := given_arguments() or sys.argv[1:])
        sys.exit(app(arguments, standalone_mode=False))
    except Exception as error:
        # typer carries a click of its own in some versions and uses the installed one in others.
        if type(error).__name__ == "Abort":
            sys.exit(128 + signal.SIGINT)  # Ctrl-C
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(REFUSED)  # the help has been printed
        refused = refusal(error)
        if inside_ranks():  # in the middle of a run, what the system refuses is no input
            end_rank(error if isinstance(error, OSError) or refused is None else refused)
        if refused is None:
            raise
    typer.echo(f"error: {refused}", err=True)
    sys.exit(refused.exit_code)


def refuse_arguments(arguments: list[str]) -> None:
    """Refuse arguments that no command takes, such as an empty path: usually an unset shell variable."""
    for before, given in zip(["", *arguments], arguments, strict=False):
        if "\0" in given or HALF.search(given):
            raise FullshardError(f"the argument {given!r} is no text and no name of a file; leave it out")
        if not given and before != "--prefix":
            raise FullshardError(f"an empty argument follows {before or 'the command'}; write its value, or leave it out")


def refusal(error: Exception) -> FullshardError | None:
    """What is wrong with the input, in a sentence; None if the exception is a bug of fullshard."""
    if isinstance(error, FullshardError):
        return error
    if hasattr(error, "format_message"):
        said = error.format_message().strip().rstrip(".").replace("\n", " ")
        return FullshardError(f"{said.replace(': Value error, ', ': ')}; see --help")
    if isinstance(error, OSError) and error.strerror:
        where = f" {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes | os.PathLike) else ""
        return FullshardError(f"the system refused{where}: {error.strerror}")
    return None


if __name__ == "__main__":
    main()
