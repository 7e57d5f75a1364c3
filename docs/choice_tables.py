"""The reference pages with their tables of choices, as the rows in fullshard/plan say.

`python docs/choice_tables.py` writes the pages; tests/pure/test_reference.py holds them against the rows.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from fullshard.plan.choice import Choice
from fullshard.plan.choice_table import NAMED, TABLE

REFERENCE = Path(__file__).parent / "reference"
MARKED = re.compile(r"(<!-- choices: (\w+) -->\n\n)(?:\|.*\n)*")
FIX = re.compile(r"^\| `--fix .*\n", re.M)
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", object: "boolean or integer"}


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    found = {name: (REFERENCE / f"{name}.md") for name in ("recipe", "plan", "cli")}
    return {path: FIX.sub(lambda _: fix_row(), MARKED.sub(_filled, path.read_text())) for path in found.values()}


def _filled(found: re.Match[str]) -> str:
    return found[1] + "".join(f"| {' | '.join(cells)} |\n" for cells in TABLES[found[2]]())


def keys(section: str) -> list[list[str]]:
    """The table of a recipe's section. `plan.strategy` has more values than the strategy's names; the page says which."""
    rows = [row for row in TABLE if row.recipe.startswith(f"{section}.") and row.name != "strategy"]
    body = [[f"`{row.recipe}`", kind(row), written(None if row.open else row.default), meaning(row)] for row in rows]
    return [["key", "type", "default", "meaning"], ["---"] * 4, *body]


def fields() -> list[list[str]]:
    """The table of a plan's fields."""
    rows = [row for row in TABLE if row.path]
    body = [[f"`{row.path}`", kind(row, null=True), f"`{json.dumps(row.default)}`", meaning(row)] for row in rows]
    return [["field", "type", "default", "meaning"], ["---"] * 4, *body]


def options() -> list[list[str]]:
    """The table of the command line's options."""
    values = {int: " N", float: " N", tuple: " NAME", str: " WORD"}
    rows = [(row, f"`{row.flag}{values.get(row.kind, '')}`") for row in NAMED.values()]
    body = [[name, str(row.default) if row.default else "", meaning(row)] for row, name in rows]
    return [["option", "default", "meaning"], ["---"] * 3, *body]


def fix_row() -> str:
    names = ", ".join(f"`{row.name}`" for row in NAMED.values() if row.fixable)
    return f"| `--fix KEY=VALUE …` | | fix choices of the search: {names} |\n"


def kind(row: Choice, *, null: bool = False) -> str:
    if row.kind is tuple:
        return "list of pairs" if row.name == "" else "list of strings"
    return TYPES[row.kind] + (" or null" if null and row.nullable else "")


def written(value: object) -> str:
    return "–" if value is None else f"`{json.dumps(value)}`"


def meaning(row: Choice) -> str:
    """The row's help with its words and its guide."""
    first, *more = row.help.removesuffix(".").split(". ")
    words = [f"`{word}`" for word in row.words]
    if not all(word in row.help for word in words):
        first += f": {', '.join(words[:-1])} or {words[-1]}"
    text = ". ".join([first, *more]) + "."
    title = row.guide.rpartition("#")[2].replace("-", " ")
    page, hash_, anchor = row.guide.partition("#")
    return f"{text} See [{title}](../guides/{page}.md{hash_}{anchor})." if row.guide else text


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "plan": lambda: keys("plan"),
    "home": lambda: keys("home"),
    "fields": fields,
    "options": options,
}

if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
