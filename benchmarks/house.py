"""The package's structure in numbers: sizes, imports, what a new choice touches, and the calls of six ways through it.

    python -m benchmarks.house                                            # the working tree
    python -m benchmarks.house --tree b4ed1e0 --tree HEAD                 # revisions, side by side
    python -m benchmarks.house --tree b4ed1e0 --tree HEAD --ways --out FILE

Reads a tree with `ast` and `git`, and imports nothing of it. `--ways` runs small things of each tree in processes of their own,
for some minutes, and counts the files they visit and the calls into a file of a higher floor: see `house_ways.py`.
"""

import argparse
import ast
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "on_torch/", "on_jax/")  # whose own files are counted: the package and its engines
CHOICES = ("rounding", "prefetch")  # simple ones: their rows stand in one file
AXIS = "tensor"
WAYS = {
    "prepare": "a recipe through `prepare`",
    "train": "`train` to the first collective",
    "find_plan": "`find_plan`",
    "offload": "a step with an offloaded update",
    "save": "`save`",
    "jax": "`train` a step on JAX, compiled",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.IfExp, ast.While, ast.match_case)
Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Tree:
    """A revision of the package. Paths are relative to `fullshard/`."""

    root: Path

    @cached_property
    def texts(self) -> dict[str, str]:
        package = self.root / "fullshard"
        return {str(path.relative_to(package)): path.read_text() for path in sorted(package.rglob("*.py"))}

    @cached_property
    def parsed(self) -> dict[str, ast.Module]:
        return {path: ast.parse(text) for path, text in self.texts.items()}

    @cached_property
    def imports(self) -> Graph:
        """The files that a file imports, at its top or in a function, but for those that only type checkers read."""
        files = {module_of(path): path for path in self.texts}
        return {path: {files[name] for name in imported(parsed, set(files))} for path, parsed in self.parsed.items()}

    @cached_property
    def floors(self) -> dict[str, tuple[int, int]]:
        """How high each file stands in the house, and inside its engine, by the order in this revision's own test of imports."""
        rooms, engine_rooms = floor_lists((self.root / "tests/pure/test_imports.py").read_text())
        return {path: floor(path.removesuffix(".py").split("/"), rooms, engine_rooms) for path in self.texts}


def module_of(path: str) -> str:
    return ".".join(["fullshard", *path.removesuffix(".py").removesuffix("__init__").strip("/").split("/")]).rstrip(".")


def imported(parsed: ast.Module, known: set[str]) -> Iterator[str]:
    """The modules among `known` that a file imports. The package imports itself by absolute names only."""
    typing = {id(n) for node in ast.walk(parsed) if is_typing(node) for n in ast.walk(node)}
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import) and id(node) not in typing:
            yield from ({alias.name for alias in node.names} & known)
        elif isinstance(node, ast.ImportFrom) and id(node) not in typing:
            names = {name if (name := f"{node.module}.{alias.name}") in known else node.module or "" for alias in node.names}
            yield from (names & known)


def is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def floor_lists(text: str) -> tuple[list[set[str]], list[str]]:
    """The rooms of each floor, lowest first, and those inside an engine, from the text of the test of imports."""
    statements = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    assigned = {ast.unparse(node.targets[0]): node.value for node in statements}
    values: dict[str, Any] = {
        name: eval(compile(ast.Expression(assigned[name]), name, "eval"), {"__builtins__": {}})  # a display of literals
        for name in ("ROOMS", "FLOORS", "ENGINE_ROOMS")
        if name in assigned
    }
    return values.get("FLOORS") or values["ROOMS"], values.get("ENGINE_ROOMS", [])


def floor(parts: list[str], rooms: list[set[str]], engine_rooms: list[str]) -> tuple[int, int]:
    room = "" if parts[0] == "__init__" else parts[0]
    height = next(i for i, names in enumerate(rooms) if room in names)
    if room not in ("on_torch", "on_jax") or not engine_rooms:
        return height, 0
    return height, engine_rooms.index(parts[1]) if parts[1] in engine_rooms else len(engine_rooms)


# -- what is counted in the text ----------------------------------------------------------------------


def measure(tree: Tree) -> dict[str, Any]:
    return sizes(tree) | imports(tree) | touched(tree)


def sizes(tree: Tree) -> dict[str, Any]:
    nodes = [node for parsed in tree.parsed.values() for node in ast.walk(parsed)]
    tops = [node for parsed in tree.parsed.values() for node in parsed.body]
    lengths = sorted((n.end_lineno or 0) - n.lineno + 1 for n in nodes if isinstance(n, FUNCTIONS))
    return {
        "files": len(tree.texts),
        "lines": sum(text.count("\n") for text in tree.texts.values()),
        "lines of the longest file": max(text.count("\n") for text in tree.texts.values()),
        "functions": len(lengths),
        "lines of a function: median": statistics.median(lengths),
        "lines of a function: 95th percentile": lengths[int(0.95 * len(lengths))],
        "lines of a function: longest": lengths[-1],
        "public functions and classes": sum(
            isinstance(n, (*FUNCTIONS, ast.ClassDef)) and not n.name.startswith("_") for n in tops
        ),
        "names shown by the package and its engines": sum(len(shown(tree.parsed[f"{f}__init__.py"])) for f in FOLDERS),
        "conditionals in planner/": sum(
            isinstance(n, BRANCHES) + len(getattr(n, "ifs", ()))  # of comprehensions
            for path, parsed in tree.parsed.items()
            if path.startswith("planner/")
            for n in ast.walk(parsed)
        ),
    }


def shown(parsed: ast.Module) -> list[str]:
    lists = (n.value for n in parsed.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    return next(map(ast.literal_eval, lists), [])


def imports(tree: Tree) -> dict[str, Any]:
    folders: Graph = {}
    for path, targets in tree.imports.items():
        folders.setdefault(folder_of(path), set()).update({folder_of(t) for t in targets} - {folder_of(path)})
    in_root = {f: sum(p.startswith(f) and "/" not in p.removeprefix(f) for p in tree.texts) for f in FOLDERS}
    return {f"files in the root of fullshard/{folder}": count for folder, count in in_root.items()} | {
        "circles of imports between files": circles(tree.imports),
        "circles of imports between folders": circles(folders),
    }


def folder_of(path: str) -> str:
    """A file's folder. Files of the package's root are rooms of their own."""
    return path.rpartition("/")[0] or path


def circles(graph: Graph) -> int:
    """How many imports must go until none are circular, if the first of each circle that is found goes."""
    graph, cut = {node: set(targets) for node, targets in graph.items()}, 0
    while circle := circle_in(graph):
        graph[circle[1]].discard(circle[0])
        cut += 1
    return cut


def circle_in(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def touched(tree: Tree) -> dict[str, Any]:
    """Files that know a choice or an axis. Planner and engines carry it out; the others only declare it or pass it on."""
    rows = {}
    for name, knows in ({f"choice `{c}`": spells(c) for c in CHOICES} | {f"mesh axis `{AXIS}`": decides_axis}).items():
        files = [path for path, parsed in tree.parsed.items() if any(map(knows, ast.walk(parsed)))]
        rows[f"files that know the {name}"] = len(files)
        rows[f"… outside planner and engines ({name})"] = sum(not p.startswith(("planner/", "on_")) for p in files)
    return rows


def spells(word: str) -> Any:
    """Whether a node is a name, an attribute, a field, an argument or a whole string that is `word`."""
    return lambda node: any(getattr(node, field, None) == word for field in ("id", "attr", "arg", "value", "name"))


def decides_axis(node: ast.AST) -> bool:
    """Whether a node reads the axis off a mesh, gives it by its name, or is its name."""
    if isinstance(node, ast.Attribute):
        return node.attr == AXIS and "mesh" in ast.unparse(node.value)
    return (isinstance(node, ast.keyword) and node.arg == AXIS) or (isinstance(node, ast.Constant) and node.value == AXIS)


# -- the six ways -------------------------------------------------------------------------------------


def walk(tree: Tree, way: str) -> dict[str, Any]:
    """Files that a way visits, in order, its calls from a file into another, and those of them that climb."""
    script = [sys.executable, str(ROOT / "benchmarks/house_ways.py"), way]
    alone = {"PYTHONPATH": str(tree.root), "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(script, cwd=folder, env=os.environ | alone, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way}: {done.stderr}")
    traced = json.loads(done.stdout.splitlines()[-1])
    below = {file: reached(tree.imports, file) for file in traced["files"]}
    calls = {f"{a} calls {name} in {b}": (a, b) for a, b, name in traced["calls"]}
    return traced | {
        "calls": list(calls),
        "climbs": [call for call, (a, b) in calls.items() if tree.floors[b] > tree.floors[a]],
        "against imports": [call for call, (a, b) in calls.items() if a in below[b]],
    }


def reached(graph: Graph, start: str) -> set[str]:
    """All that a file imports, directly or not, but for what it gets by importing the package."""
    seen: set[str] = set()
    new = graph[start]
    while new := new - seen - {"__init__.py"}:
        seen |= new
        new = {target for node in new for target in graph[node]}
    return seen


def way_rows(ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for way, walked in ways.items():
        rows[f"{WAYS[way]}: files visited"] = len(walked["files"])
        rows[f"{WAYS[way]}: calls from file to file"] = len(walked["calls"])
        rows[f"{WAYS[way]}: climbs by floor"] = len(walked["climbs"])
        rows[f"{WAYS[way]}: calls against imports"] = len(walked["against imports"])
    return rows | ({"`train` to the first collective: frames in between": ways["train"]["depth"]} if "train" in ways else {})


# -- trees and the table ------------------------------------------------------------------------------


def extract(revision: str, folder: Path) -> Tree:
    """The tree of a revision, without a checkout."""
    packed = subprocess.run(["git", "archive", revision, "fullshard", "tests/pure"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return Tree(folder)


def short(revision: str) -> str:
    """The first digits of a revision's hash."""
    answer = subprocess.run(["git", "rev-parse", "--short=7", "--verify", revision], cwd=ROOT, capture_output=True, text=True)
    return answer.stdout.strip() or sys.exit(f"{revision} is no revision")


def table(columns: dict[str, dict[str, Any]]) -> str:
    heads = list(columns)
    names = list(dict.fromkeys(name for rows in columns.values() for name in rows))
    lines = [["", *heads], ["---", *("---:" for _ in heads)]]
    lines += [[name, *(f"{columns[head].get(name, ''):,}" for head in heads)] for name in names]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tree", action="append", metavar="REV", help="a revision, as often as wanted; by default the working tree"
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, help="trace the six ways too, or those named")
    parser.add_argument("--out", type=Path, help="write the table, and what the ways visit, as JSON")
    given = parser.parse_args()
    asked = given.ways if given.ways or given.ways is None else list(WAYS)
    columns, ways = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in map(short, given.tree) if given.tree else ["working tree"]:
            tree = extract(name, Path(folder, name)) if given.tree else Tree(ROOT)
            ways[name] = {way: walk(tree, way) for way in asked or ()}
            columns[name] = measure(tree) | way_rows(ways[name])
    print(table(columns))
    if given.out:
        given.out.write_text(json.dumps({"table": columns, "ways": ways}, indent=1) + "\n")


if __name__ == "__main__":
    main()
