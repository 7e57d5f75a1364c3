"""A name means one thing: no public class and no file occurs twice in the package. Nothing asks for an engine's name."""

import ast
from collections import defaultdict
from pathlib import Path

import fullshard
from fullshard.plan.engine_traits import ENGINES

HOUSE = Path(fullshard.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))
# A command's file is called as the command. The engines' files for one thing have one name.
TWICE = {"__init__.py", *(path.name for place in ("commands", "on_jax") for path in (HOUSE / place).rglob("*.py"))}


def public_classes(text: str) -> list[str]:
    return [n.name for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]


def twice(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in found.items() if len(places) > 1}


def test_no_public_class_name_occurs_twice():
    found = defaultdict(list)
    for path in FILES:
        for name in public_classes(path.read_text()):
            found[name].append(str(path.relative_to(HOUSE)))
    assert "Plan" in found
    assert twice(found) == {}


def test_no_file_name_occurs_twice():
    found = defaultdict(list)
    for path in FILES:
        if path.name not in TWICE:
            found[path.name].append(str(path.relative_to(HOUSE)))
    assert "strategies.py" in found
    assert twice(found) == {}


def test_files_are_small():
    long = {str(p.relative_to(HOUSE)): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}


def test_a_planted_class_is_seen():
    assert public_classes("class A: ...\nclass _B: ...\ndef f():\n    class C: ...") == ["A"]
    assert twice({"A": ["x", "y"], "B": ["z"]}) == {"A": ["x", "y"]}


# -- engines are known by their traits ------------------------------------------------------------------------------

ASKING = {HOUSE / "planner/search"}  # it still compares names


def compared_engines(text: str) -> list[str]:
    """The comparisons with an engine's name in a file."""
    found = [ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Compare)]
    return [c for c in found if "engine" in c and any(repr(name) in c for name in ENGINES)]


def test_engines_are_asked_for_their_traits():
    outside = [p for p in FILES if p.parent not in ASKING and p.relative_to(HOUSE).parts[0] not in ("on_torch", "on_jax")]
    found = {str(p): compared for p in outside if (compared := compared_engines(p.read_text()))}
    assert found == {}


def test_a_planted_comparison_is_seen():
    assert compared_engines("x = 1 if found.engine == 'jax' else 2") == ["found.engine == 'jax'"]
    assert compared_engines("engine in ('torch', other)") == ["engine in ('torch', other)"]
    assert compared_engines("plan.wire.memory == 'torch'") == []
