"""Imports point downward only. Reads every file's AST; imports nothing of what it checks."""

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

import pytest

import fullshard

HOUSE = Path(fullshard.__file__).parent
# The house, lowest room first. A room imports only rooms below it.
FLOORS = [
    *({"base"}, {"plan"}, {"cluster"}, {"model"}, {"planner"}, {"storage"}, {"ranks"}, {"checkpoint"}, {"data"}, {"engine"}),
    *({"on_torch", "on_jax"}, {"runs"}, {"launch"}, {"observe"}, {""}, {"commands"}, {"__main__"}),
]
LAYER = {room: layer for layer, rooms in enumerate(FLOORS) for room in rooms}
# The same inside an engine; files of its root are above all its rooms.
ENGINE_ROOMS = [
    *("private", "tensors", "ranks", "model", "loss", "optimizers", "communication", "offload", "parallelize", "tracing"),
    *("step", "saving", "measuring", "interop", "peers"),
]
STANDARD = {"base", "plan", "cluster", "model", "planner", "ranks", "engine"}  # these import the standard library alone
# What the package shows besides: it imports its engine when it is called.
SHOWN = {"fullshard.runs.train_loop"}
HEAVY = {
    "torch",
    "torchao",
    "transformers",
    "peft",
    "accelerate",
    "deepspeed",
    "megatron_fsdp",
    "lightning_fabric",
    "lightning",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax",
}
MAY = {
    "on_torch": {
        "torch",
        "torchao",
        "transformers",
        "peft",
        "accelerate",
        "deepspeed",
        "megatron_fsdp",
        "lightning_fabric",
        "lightning",
    },
    "on_jax": {"jax", "jaxlib", "flax", "optax", "orbax", "transformers"},
    "storage": {"torch"},  # pinned memory
}
MAY_LAZILY = {"runs": {"torch"}, "launch": {"torch"}}  # the launcher is torch's own


When = Literal["top", "lazy", "typing"]


@dataclass(frozen=True)
class Source:
    """A file: its dotted name, whether it is a package's `__init__`, and its text."""

    module: str
    package: bool
    text: str

    @property
    def room(self) -> str:
        return room(self.module)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def read(path: Path) -> Source:
    parts = path.relative_to(HOUSE.parent).with_suffix("").parts
    package = parts[-1] == "__init__"
    return Source(".".join(parts[:-1] if package else parts), package, path.read_text())


SOURCES = [read(path) for path in sorted(HOUSE.rglob("*.py"))]
MODULES = {s.module for s in SOURCES}

# -- what a file imports ------------------------------------------------------------------------------


def statements(node: ast.AST, when: When = "top") -> Iterator[tuple[ast.AST, When]]:
    """Import statements, each with when it runs: as the file is imported, when a function is called, or never."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, when
        lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from statements(child, "typing" if typing or when == "typing" else "lazy" if lazy else when)


def targets(statement: ast.AST, source: Source, known: set[str]) -> list[str]:
    """Absolute names of the modules that a statement imports."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    base = statement.module or ""
    if statement.level:
        up = statement.level - source.package
        around = source.module.split(".")
        base = ".".join([*around[: len(around) - up], *([base] if base else [])])
    whole = [f"{base}.{alias.name}" for alias in statement.names]
    return [name if name in known else base for name in whole]


def imports(source: Source, known: set[str]) -> list[tuple[str, When]]:
    return [(t, when) for s, when in statements(ast.parse(source.text)) for t in targets(s, source, known)]


# -- the rules ----------------------------------------------------------------------------------------


def violations(source: Source, known: set[str] = MODULES) -> list[str]:
    """What a file imports and should not, a sentence each."""
    if source.room not in LAYER:
        return [f"{source.module} is in no room; give it a floor in FLOORS"]
    found = [(target, objection(source, target, when == "top")) for target, when in imports(source, known)]
    return [f"{source.module} imports {target}: {why}" for target, why in found if why]


def objection(source: Source, target: str, top: bool) -> str:
    outside = target.split(".")[0]
    return inside_objection(source, target, top) if outside == "fullshard" else outside_objection(source, outside, top)


def outside_objection(source: Source, name: str, top: bool) -> str:
    if source.room in STANDARD and name not in sys.stdlib_module_names:
        return "its room is standard library only"
    allowed = MAY.get(source.room, set()) | (set() if top else MAY_LAZILY.get(source.room, set()))
    return "only engines import it" if name in HEAVY and name not in allowed else ""


def inside_objection(source: Source, target: str, top: bool) -> str:
    mine, theirs = LAYER[source.room], LAYER.get(room(target))
    if theirs is None:
        return "it is in no room"
    if not source.room and top and room(target) not in STANDARD and target not in SHOWN:
        return "importing the package imports only what is standard library"
    if source.room in ("on_torch", "on_jax") and target.startswith("fullshard.planner.search"):
        return "engines carry plans out, they do not search"
    if source.room in ("runs", "observe", "commands") and room(target) in ("on_torch", "on_jax"):
        return "ask load_engine or engine_of for an engine"
    if source.room == room(target):
        return "" if engine_floor(target) <= engine_floor(source.module) else "imports point downward inside an engine"
    return "" if theirs < mine else "imports point downward"


def engine_floor(module: str) -> int:
    """How high a file is inside its engine; 0 outside engines."""
    _, *inside = module.split(".")
    if not inside or inside[0] not in ("on_torch", "on_jax"):
        return 0
    return ENGINE_ROOMS.index(inside[1]) if len(inside) > 1 and inside[1] in ENGINE_ROOMS else len(ENGINE_ROOMS)


def cycle(sources: list[Source]) -> list[str]:
    """A ring of files that import each other, at their tops or in functions, or nothing."""
    known = {s.module for s in sources}
    graph = {s.module: {t for t, when in imports(s, known) if when != "typing" and t in known} for s in sources}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


# -- the package obeys them ---------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.module)
def test_imports_point_downward(source):
    assert violations(source) == []


def test_no_two_files_import_each_other():
    assert cycle(SOURCES) == []


def test_the_files_were_read():
    assert {"fullshard", "fullshard.plan.plan", "fullshard.commands.cli", "fullshard.on_torch.model.built_in.llama"} <= MODULES
    plan = next(s for s in SOURCES if s.module == "fullshard.on_torch.tracing.describe")
    assert {("fullshard.base.errors", "top"), ("torch", "top"), ("typing", "top")} <= set(imports(plan, MODULES))


# -- planted violations are found ---------------------------------------------------------------------

PLANTED = [
    ("fullshard.plan.plan", "import numpy", "its room is standard library only"),
    ("fullshard.plan.plan", "def f():\n    import torch", "its room is standard library only"),
    ("fullshard.plan.plan", "from fullshard.planner import schedule", "imports point downward"),
    ("fullshard.plan.plan", "def f():\n    from fullshard import on_torch", "imports point downward"),
    ("fullshard.plan.plan", "from .. import commands", "imports point downward"),
    ("fullshard.plan.plan", "import fullshard", "imports point downward"),
    ("fullshard.plan.plan", "from fullshard import Plan", "imports point downward"),
    ("fullshard.planner.search.search", "import torch", "its room is standard library only"),
    ("fullshard.planner.search.search", "from fullshard.storage import pinned_arena", "imports point downward"),
    ("fullshard.checkpoint.commit", "try:\n    import torch\nexcept ImportError:\n    pass", "only engines import it"),
    ("fullshard.on_torch.parallelize.shard", "from fullshard import on_jax", "imports point downward"),
    ("fullshard.on_torch.parallelize.shard", "import jax.numpy as jnp", "only engines import it"),
    ("fullshard.on_torch.model.weights", "from fullshard.planner import search", "engines carry plans out, they do not search"),
    (
        "fullshard.on_torch.parallelize.shard",
        "from fullshard.planner.search.search import find",
        "engines carry plans out, they do not search",
    ),
    ("fullshard.on_torch.parallelize.shard", "from ...runs import train_loop", "imports point downward"),
    ("fullshard.on_torch.parallelize.shard", "from fullshard.on_torch.step import generate", "downward inside an engine"),
    ("fullshard.on_torch.loss.losses", "def f():\n    from fullshard.on_torch import engine", "downward inside an engine"),
    ("fullshard.on_jax.parallelize.shard", "import torch", "only engines import it"),
    ("fullshard.on_jax.parallelize.shard", "def f():\n    from fullshard.on_torch import describe", "imports point downward"),
    ("fullshard.runs.train_loop", "from torch import nn", "only engines import it"),
    ("fullshard.runs.train_loop", "class A:\n    import torch", "only engines import it"),
    ("fullshard.runs.train_loop", "from fullshard.observe import page", "imports point downward"),
    ("fullshard.runs.train_loop", "def f():\n    from fullshard.on_torch import shard", "ask load_engine or engine_of"),
    ("fullshard.commands.train", "from fullshard import on_torch", "ask load_engine or engine_of"),
    ("fullshard.commands.cli", "def f():\n    import torch", "only engines import it"),
    ("fullshard.shed.plan", "", "is in no room"),
    ("fullshard.commands.cli", "from fullshard.shed import plan", "it is in no room"),
]
ALLOWED = [
    ("fullshard.plan.plan", "import json\nfrom fullshard.base.errors import nearest\nfrom .text import table"),
    ("fullshard.storage.pinned_arena", "import torch\nfrom fullshard.storage import disk_file"),
    ("fullshard.planner.search.search", "from fullshard.planner import schedule\nfrom fullshard.cluster.topology import Cluster"),
    ("fullshard.on_torch.parallelize.shard", "import torch\nfrom fullshard.planner import schedule\nfrom . import describe"),
    ("fullshard.on_jax.parallelize.shard", "import jax, optax"),
    ("fullshard.runs.metrics", "from fullshard.engine.engine import load_engine\ndef f():\n    import torch"),
    ("fullshard.runs.train_loop", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ("fullshard.commands.cli", "import typer, fullshard\ndef f():\n    from fullshard.runs import train_loop"),
]
PLANNED = MODULES | {
    "fullshard.planner.search.search",
    "fullshard.planner.step.schedule",
    "fullshard.on_jax",
    "fullshard.shed.plan",
}


@pytest.mark.parametrize(("module", "text", "why"), PLANTED)
def test_planted(module, text, why):
    (found,) = violations(Source(module, False, text), PLANNED)
    assert why in found


@pytest.mark.parametrize(("module", "text"), ALLOWED)
def test_allowed(module, text):
    assert violations(Source(module, False, text), PLANNED) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from fullshard.plan.plan import Plan", 0),
        ("from fullshard.planner import memory", 0),
        ("from fullshard.data import tables", 1),
        ("from .on_torch import shard", 1),
        ("def train():\n    from fullshard.runs import train_loop", 0),
        ("def main():\n    from fullshard.commands import cli", 1),
    ],
)
def test_the_package_itself(text, count):
    assert len(violations(Source("fullshard", True, text), PLANNED)) == count


def test_a_planted_cycle_is_found():
    ring = [("fullshard.on_torch.a", "from fullshard.on_torch import b"), ("fullshard.on_torch.b", "from .a import x")]
    assert len(cycle([Source(m, False, text) for m, text in ring])) == 3
    lazy = [ring[0], ("fullshard.on_torch.b", "def f():\n    from .a import x")]
    assert len(cycle([Source(m, False, text) for m, text in lazy])) == 3
    typing = [ring[0], ("fullshard.on_torch.b", "if TYPE_CHECKING:\n    from .a import x")]
    assert cycle([Source(m, False, text) for m, text in typing]) == []


# -- the public faces ---------------------------------------------------------------------------------


def in_order(name: str) -> tuple[int, str]:
    """As ruff sorts: CONSTANTS, Classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("name", ["fullshard", "fullshard.on_torch", "fullshard.on_torch.model.built_in"])
def test_all(name):
    module = importlib.import_module(name)
    assert module.__all__ == sorted(module.__all__, key=in_order)
    assert [n for n in module.__all__ if not hasattr(module, n)] == []
    assert set(module.__all__) == shown(name)


def shown(name: str) -> set[str]:
    """The public names that a package's `__init__` takes from its own files or defines."""
    tree = ast.parse(next(s.text for s in SOURCES if s.module == name))
    taken = [n for n in tree.body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith(name)]
    defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    names = [alias.asname or alias.name for n in taken for alias in n.names] + defined
    return {n for n in names if not n.startswith("_")}
