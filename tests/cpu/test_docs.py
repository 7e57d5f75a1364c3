"""The documentation is true: its Python runs, its commands succeed and print what it shows."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fullshard.plan.plan import Plan
from fullshard.runs.recipe.recipe import Recipe
from tests.cpu.doc_blocks import FENCE, NOT_RUN, ROOT, SHELL, Block, blocks_of, commands_of, shows

RUN = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]  # pages whose blocks are run
TUTORIAL = ROOT / "docs/start.md"
PAGES = [*RUN, ROOT / "CONTRIBUTING.md", ROOT / "recipes/README.md", ROOT / "benchmarks/results/README.md"]
LANGUAGES = {"", "python", *SHELL, "text", "json", "toml"}
COMMAND = re.compile(r"^(\$ |fullshard |torchrun |srun |pip |make |python )", re.M)
LONGEST = 600  # characters of a paragraph: five lines of 120
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def run_blocks(pages: list[Path]) -> dict[str, str | None]:
    """For each page what went wrong, or None. One process runs them all, without ranks or GPU."""
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.cpu.doc_blocks", *map(str, pages)]
    done = subprocess.run(command, cwd=ROOT, env=kept | alone, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_blocks([page for page in RUN if page != TUTORIAL])


@pytest.mark.parametrize("page", [page for page in RUN if page != TUTORIAL], ids=name_of)
def test_blocks_run(page: Path, outcomes):
    assert outcomes[str(page)] is None, outcomes[str(page)]


@pytest.mark.full  # it trains for 200 steps
def test_the_tutorial_runs():
    assert run_blocks([TUTORIAL]) == {str(TUTORIAL): None}


@each_page
def test_a_block_that_is_not_run_says_why(page: Path):
    found = blocks_of(page.read_text())
    assert {b.language for b in found} <= LANGUAGES
    reasons = [m[1] for b in found for m in NOT_RUN.finditer(b.text)]
    assert all(reasons), "write `# not run: REASON`"
    plain = [b.line for b in found if not b.language and COMMAND.search(b.text)]
    assert not plain, f"blocks after lines {plain} hold commands: label them sh or console"


@each_page
def test_paragraphs_are_short(page: Path):
    assert [p for p in paragraphs(page) if len(p) > LONGEST] == []


@each_page
def test_promises_are_kept_out(page: Path):
    """What a page says works. What does not is in a list of limits."""
    sections = re.split(r"^(?=#+ )", prose(page), flags=re.M)
    others = [s for s in sections if "limit" not in s.partition("\n")[0].lower()]
    assert [s.partition("\n")[0] for s in others if re.search(r"\bnot yet\b", s, re.I)] == []


@each_page
def test_files_shown_are_what_the_code_reads(page: Path):
    for block in blocks_of(page.read_text()):
        if block.language == "json" and '"units"' in block.text:
            assert Plan.from_json(block.text).to_json() == block.text
        if block.language == "toml":
            unknown = [key for key in toml_keys(block.text) if key not in recipe_keys()]
            assert not unknown, f"line {block.line}: no recipe has {unknown}"


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def paragraphs(page: Path) -> list[str]:
    """Paragraphs and list items, without tables."""
    items = re.split(r"\n(?:[ \t]*\n|(?=[ \t]*(?:[-*]|\d+\.) )|(?=\|))", prose(page))
    return [" ".join(item.split()) for item in items if not item.lstrip().startswith("|")]


def toml_keys(text: str) -> list[str]:
    tree = tomllib.loads(text)
    return [f"{s}.{k}" if isinstance(t, dict) else s for s, t in tree.items() for k in (t if isinstance(t, dict) else [s])]


def recipe_keys() -> set[str]:
    sections = Recipe.model_json_schema()
    kinds = {name: str(part).partition("#/$defs/")[2].partition("'")[0] for name, part in sections["properties"].items()}
    return {"plan", *(f"{name}.{key}" for name, kind in kinds.items() for key in sections["$defs"][kind]["properties"])}


# -- the finder itself: a page whose fences it misread would pass without being run ------------------------------------------


def test_blocks_are_found():
    console = "$ fullshard models \\\n --json\n…\nend\n$ ls\n$ pip install x  # not run: needs a network\n"
    found = blocks_of(f"a\n```python\nx = 1\n```\n```console\n{console}```\n```sh\n# not run: slow\nmake\n```\n")
    assert found[0] == Block("python", 2, "x = 1\n")
    models, listing = commands_of(found[1])
    assert models.text == "fullshard models   --json"
    assert models.shown == ("…", "end")
    assert models.in_process
    assert listing.text == "ls"
    assert not listing.in_process
    assert commands_of(found[2]) == []
    assert found[2].skipped


def test_output_is_compared():
    assert shows(["…", "end"], "1\n2\nend\n")
    assert not shows(["end"], "1\nend\n")
    assert shows(["a", "…"], "a\n")
    assert shows(["a … c"], "a b c\n")
    assert not shows(["a … c"], "a b\n")
