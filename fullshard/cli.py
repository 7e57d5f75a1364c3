"""The command line: parses, calls one function, prints. Data on stdout, the rest on stderr.

Nothing here imports torch or jax at the top: `--help` must be quick, and presets need neither.
"""

import os
import signal
import sys
import time
from typing import Annotated

import typer

import fullshard
from fullshard.commands import checkpoint, data, plan
from fullshard.commands.measure import measure
from fullshard.commands.train import train
from fullshard.errors import FullshardError
from fullshard.launch.local import given_arguments

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
    """The entry point: a refusal, ours or the parser's, is one sentence on stderr and exit code 2."""
    try:
        sys.exit(app(given_arguments(), standalone_mode=False))
    except FullshardError as error:
        _refuse(str(error), error.exit_code)
    except Exception as error:
        # typer carries a click of its own in some versions and uses the installed one in others.
        if type(error).__name__ == "Abort":
            sys.exit(128 + signal.SIGINT)  # Ctrl-C
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(2)  # the help has been printed
        _refuse(f"{error.format_message().strip().rstrip('.').replace(chr(10), ' ')}; see --help")


def _refuse(sentence: str, code: int = 2) -> None:
    # What all ranks find is said once: the launcher ends the others when the first rank has spoken.
    if os.environ.get("RANK", "0") != "0":
        time.sleep(5)
    typer.echo(f"error: {sentence}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
