"""`fullshard page`: plans and runs in the browser."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fullshard.base.errors import FullshardError
from fullshard.commands.common import describe_costs

PACKAGES = ("starlette", "uvicorn", "plotly", "xxhash")


def page(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Runs to show; several are drawn together.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="The Plan view begins with it: a preset, or a Hugging Face directory.")
    ] = "llama3-8b",
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="CLUSTER", help="The same: 64xh100, or a file of `measure`.")
    ] = "8xh100",
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="An address of this machine that no other can reach.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0: any that is free.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Only print the address; open no browser.")] = False,
) -> None:
    """Show plans and runs in the browser: what a plan costs as you change it, and how runs go.

    The page is for this machine alone. It needs no network, and it only reads. Ctrl-C ends it.

    Example: fullshard page runs/first runs/second
    """
    if any(find_spec(name) is None for name in PACKAGES):
        raise FullshardError("the page needs a web server and a charting library: pip install 'fullshard[page]'")
    from fullshard.cluster.topology import Cluster
    from fullshard.observe.page.plan_request import refuse_cluster, refuse_model
    from fullshard.observe.page.server import listen, open_runs, serve

    refuse_model(model)
    refuse_cluster(cluster)
    Cluster.load(cluster)
    shown = open_runs(runs or [])
    address = listen(host, port)
    typer.echo(address.url)
    if not no_open and not _open(address.url):
        typer.echo("no browser was found: open the address yourself", err=True)
    typer.echo("Ctrl-C ends it", err=True)
    serve(address, shown, describe_costs, {"model": model, "cluster": cluster})


def _open(url: str) -> bool:
    """Open a browser with a window; False if there is none. One in the terminal would hold up the server."""
    import webbrowser

    has_display = sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return has_display and webbrowser.open(url)  # the socket listens already: the browser's request waits for the server
