"""The command line: parses, calls one function, prints. Data on stdout, the rest on stderr.

Nothing here imports torch or jax at the top: `--help` must be quick, and presets need neither.
"""

import signal
import sys
from typing import Annotated, Any

import typer

import fullshard
from fullshard.commands import checkpoint, data, plan
from fullshard.commands.measure import measure
from fullshard.commands.train import train
from fullshard.errors import REFUSED, FullshardError
from fullshard.launch.local import given_arguments, inside_ranks
from fullshard.launch.rank_end import end_rank

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
for command in (plan.models, plan.units, plan.explain, measure, train):
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
    """The entry point: a refusal, ours or the parser's, is one sentence on stderr and its exit code."""
    arguments = given_arguments()
    try:
        sys.exit(app(arguments, standalone_mode=False))
    except FullshardError as error:
        refused: Exception = error
    except Exception as error:
        # typer carries a click of its own in some versions and uses the installed one in others.
        if type(error).__name__ == "Abort":
            sys.exit(128 + signal.SIGINT)  # Ctrl-C
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(REFUSED)  # the help has been printed
        if not (hasattr(error, "format_message") or inside_ranks()):
            raise
        refused = _usage(error) if hasattr(error, "format_message") else error
    if inside_ranks():
        end_rank(refused)
    typer.echo(f"error: {refused}", err=True)
    sys.exit(getattr(refused, "exit_code", REFUSED))


def _usage(error: Any) -> FullshardError:
    """What the parser has to say, as a sentence."""
    return FullshardError(f"{error.format_message().strip().rstrip('.').replace(chr(10), ' ')}; see --help")


if __name__ == "__main__":
    main()
