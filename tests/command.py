"""The `fullshard` command without a process of its own: a start costs what most tests take."""

import io
import os
import subprocess
import sys
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

PLAIN = {"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}


def fullshard_here(*arguments: str, cwd: Path | str = ".") -> subprocess.CompletedProcess[str]:
    """Run the command in this process, through the entry point that the installed script calls."""
    from fullshard.commands.cli import main

    out, err = io.StringIO(), io.StringIO()
    with ExitStack() as around:
        for context in (redirect_stdout(out), redirect_stderr(err), chdir(cwd), mock.patch.dict(os.environ, PLAIN)):
            around.enter_context(context)
        around.enter_context(mock.patch.object(sys, "argv", ["fullshard", *arguments]))
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(["fullshard", *arguments], code or 0, out.getvalue(), err.getvalue())


def fullshard_process(*arguments: str, cwd: Path | str = ".", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a shell does."""
    command, plain = [sys.executable, "-m", "fullshard", *arguments], {**os.environ, **PLAIN, **environment}
    return subprocess.run(
        command, cwd=cwd, env=plain, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, check=False
    )
