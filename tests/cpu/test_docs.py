"""The documentation is true: its Python runs, its commands succeed and print what it shows, its links
lead somewhere, its plan files are what the code writes."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.plan import Plan

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md"]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.M | re.S)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
SKIPPED = "# not run"
ANYTHING = "…"  # alone on a line of output: any lines
RUNNER = """
import sys
names = {"__name__": "__main__"}
for page, line, source in eval(sys.stdin.read()):
    exec(compile("\\n" * line + source, page, "exec"), names)
"""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The page's fenced blocks in a language, each with the number of lines above its first."""
    text = page.read_text()
    return [(text[: m.start(2)].count("\n"), m[2]) for m in FENCE.finditer(text) if m[1] == language]


def run(command: list[str], directory: Path, stdin: str = "") -> subprocess.CompletedProcess:
    """As one process without ranks or GPU, in a directory of its own."""
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launched}
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    options = {"cwd": directory, "env": kept | alone, "input": stdin, "capture_output": True, "text": True}
    return subprocess.run(command, **options, timeout=240, encoding="utf-8", check=False)


def commands(block: str) -> list[tuple[str, list[str]]]:
    """The `fullshard …` lines of a console block, each with the output shown under it.

    A line that starts with `$` is a command; in a block without any, every line is one.
    """
    lines = block.replace("\\\n", " ").splitlines()
    prompted = any(line.startswith("$ ") for line in lines)
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("$ ") or not prompted:
            found.append((line.removeprefix("$ ").strip(), []))
        elif found:
            found[-1][1].append(line.rstrip())
    return [(command, shown) for command, shown in found if command.startswith("fullshard ")]


def shows(shown: list[str], printed: list[str]) -> bool:
    """Whether a page's lines are the printed ones, where `…` stands for any."""
    pattern = "".join("(?:.*\n)*" if line.strip() == ANYTHING else re.escape(line) + "\n" for line in shown)
    return re.fullmatch(pattern, "".join(line.rstrip() + "\n" for line in printed)) is not None


@each_page
def test_python_blocks_run(page: Path, tmp_path: Path):
    sources = [(str(page), line, text) for line, text in blocks(page, "python") if not text.startswith(SKIPPED)]
    done = run([sys.executable, "-W", "ignore", "-c", RUNNER], tmp_path, stdin=repr(sources))
    assert done.returncode == 0, done.stderr


@each_page
def test_commands_succeed_and_print_what_is_shown(page: Path, tmp_path: Path):
    for _, block in blocks(page, "console"):
        for command, shown in commands(block):
            done = run([sys.executable, "-m", "fullshard.cli", *shlex.split(command, comments=True)[1:]], tmp_path)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            assert not shown or shows(shown, done.stdout.splitlines()), f"{command} prints\n{done.stdout}"


@each_page
def test_relative_links_lead_somewhere(page: Path):
    prose = FENCE.sub("", page.read_text())
    targets = [t.partition("#")[0] for t in LINK.findall(prose) if not re.match(r"\w+:", t)]
    assert [t for t in targets if t and not (page.parent / t).exists()] == []


@each_page
def test_plan_files_are_what_the_code_writes(page: Path):
    for _, text in blocks(page, "json"):
        if '"units"' in text:
            assert Plan.from_json(text).to_json() == text


def test_blocks_are_found(tmp_path: Path):
    """The finder itself: a page whose fences it misread would pass without being run."""
    page = tmp_path / "page.md"
    console = "$ fullshard models \\\n --json\n…\nend\n$ ls\n"
    page.write_text(f"a\n```python\nx = 1\n```\n```console\n{console}```\n```python\n# not run\n```\n")
    assert blocks(page, "python") == [(2, "x = 1\n"), (12, "# not run\n")]
    assert commands(blocks(page, "console")[0][1]) == [("fullshard models   --json", ["…", "end"])]
    assert shows(["…", "end"], ["1", "2", "end"])
    assert not shows(["end"], ["1", "end"])
    assert shows(["a", "…"], ["a"])
