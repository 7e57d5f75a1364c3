"""Code blocks of Markdown pages, and a program that runs them.

`python -m tests.cpu.doc_blocks PAGE...` imports what is slow once and forks a process for each page. It prints a JSON
object: for each page None, or what went wrong. The blocks of a page run in order, in one directory. Seconds go to stderr.
"""

import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.command import fullshard_here

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.M | re.S)
NOT_RUN = re.compile(r"#[ \t]*not run\b[ \t]*:?[ \t]*(.*)")
SHELL = ("sh", "bash", "console")
ANYTHING = "…"  # in shown output: any text; alone on a line: any lines
# Before the forks: they take seconds, and most pages need them.
PRELOADED = (
    "fullshard.commands.cli",
    "fullshard.planner.search.search",
    "fullshard.on_torch",
    "torch._dynamo",
    "transformers",
    "peft",
)
SHARED = ("README.md", "docs", "examples", "recipes")  # what a page finds in its directory


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` counts the lines of the page above its first."""

    language: str
    line: int
    text: str

    @property
    def skipped(self) -> bool:
        return NOT_RUN.match(self.text) is not None


@dataclass(frozen=True)
class Command:
    """A command line and the output that a page shows under it."""

    text: str
    shown: tuple[str, ...] = ()

    @property
    def in_process(self) -> bool:
        """True for a `fullshard` command that needs no shell and starts no ranks."""
        words = self.text.split()
        starts_ranks = words[1:2] == ["train"] and "--dry-run" not in words
        return words[0] == "fullshard" and not starts_ranks and not re.search(r"[|<>&;$`*]", self.text)


def blocks_of(text: str) -> list[Block]:
    return [Block(m[1], text[: m.start(2)].count("\n"), m[2]) for m in FENCE.finditer(text)]


def commands_of(block: Block) -> list[Command]:
    """The commands of a shell block that are to be run.

    In a `console` block a line that starts with `$` is a command and the others are its output.
    """
    if block.skipped:
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language != "console":
        return [Command(line.strip()) for line in lines if line.strip() and not _is_comment(line)]
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("$ "):
            found.append((line[2:].strip(), []))
        elif found:
            found[-1][1].append(line.rstrip())
    return [Command(text, tuple(shown)) for text, shown in found if not NOT_RUN.search(text)]


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#") or NOT_RUN.search(line) is not None


def shows(shown: tuple[str, ...] | list[str], printed: str) -> bool:
    """True if a page's lines are the printed ones, where `…` stands for anything."""
    pattern = "".join("(?:.*\n)*" if line.strip() == ANYTHING else _line_pattern(line) for line in shown)
    return re.fullmatch(pattern, "".join(line.rstrip() + "\n" for line in printed.splitlines())) is not None


def _line_pattern(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.split(ANYTHING)) + "\n"


# -- running -----------------------------------------------------------------------------------------------------------------


def run_page(text: str, name: str) -> None:
    """Run all blocks of a page in the working directory; raise for the first that fails."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(text):
        if block.language == "python" and not block.skipped:
            with redirect_stdout(io.StringIO()):
                exec(compile("\n" * block.line + block.text, name, "exec"), names)
        elif block.language in SHELL:
            run_shell(block, name)


def run_shell(block: Block, name: str) -> None:
    commands = commands_of(block)
    if block.language != "console" and not all(c.in_process for c in commands):
        commands = [Command("\n".join(["set -e", *(c.text for c in commands)]))]  # one script: it may use cd and export
    for command in commands:
        code, out, err = in_process(command.text) if command.in_process else in_shell(command.text)
        where, fails = f"{name}:{block.line}: {command.text}", any(line.startswith("error:") for line in command.shown)
        assert bool(code) == fails, f"{where}\nexit code {code}\n{out}{err}"
        assert not command.shown or shows(command.shown, out) or shows(command.shown, out + err), f"{where} prints\n{out}{err}"


def in_process(command: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a `fullshard` command."""
    done = fullshard_here(*shlex.split(command, comments=True)[1:])
    return done.returncode, done.stdout, done.stderr


def in_shell(command: str) -> tuple[int, str, str]:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


def run_pages(pages: list[Path]) -> dict[str, str | None]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PATH"] = f"{_make_command(Path(folder) / 'bin')}:{os.environ['PATH']}"
        return {str(page): _run_forked(page, Path(folder) / str(i)) for i, page in enumerate(pages)}


def _make_command(folder: Path) -> Path:
    """A `fullshard` of this tree, for shells."""
    folder.mkdir()
    script = folder / "fullshard"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fullshard "$@"\n')
    script.chmod(0o755)
    return folder


def _run_forked(page: Path, directory: Path) -> str | None:
    """What went wrong, from a process of the page's own."""
    directory.mkdir()
    for name in SHARED:
        (directory / name).symlink_to(ROOT / name)
    report = directory.with_suffix(".error")
    sys.stdout.flush()
    began = time.perf_counter()
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        print(f"{time.perf_counter() - began:6.1f} s  {page}", file=sys.stderr, flush=True)
        return report.read_text() if report.exists() else f"ended with status {status}" if status else None
    try:
        os.chdir(directory)
        run_page(page.read_text(), str(page))
    except BaseException:
        report.write_text(traceback.format_exc())
    os._exit(0)


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    print(json.dumps(run_pages([Path(name) for name in sys.argv[1:]])))
