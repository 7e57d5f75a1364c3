"""The reference pages name everything that the code has, and nothing else."""

import dataclasses
import inspect
import json
import re
import runpy
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import typer.main
from pydantic_core import PydanticUndefined

import fullshard
from fullshard.base.text import bytes_text
from fullshard.checkpoint.manifest import Manifest
from fullshard.cluster.measured import Measured
from fullshard.cluster.topology import Cluster
from fullshard.commands.cli import app
from fullshard.data import TokenWriter
from fullshard.model.description import Tensor
from fullshard.plan.choice_table import NAMED
from fullshard.runs.recipe.recipe import Recipe

REFERENCE = Path(__file__).parents[2] / "docs/reference"
GUIDES = REFERENCE.parent / "guides"
SMALL = {
    "model": {"name": "llama-bytes"},
    "data": {"path": "tokens", "sequence": 128},
    "train": {"steps": 1, "global_batch": 1},
}
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "table", tuple: "list"}


def page(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text()


def section(text: str, title: str) -> str:
    """What a page says under a heading, up to the next one of its level."""
    level = title.partition(" ")[0]
    return re.split(rf"^{level} ", text.partition(f"\n{title}\n")[2], maxsplit=1, flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all rows whose first cell begins with code."""
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in cells] for cells in found]


def names(cell: str, pattern: str = r"[\w.\[\]]+") -> list[str]:
    """The first word of each piece of code in a cell."""
    return re.findall(rf"`({pattern})", cell)


# -- choices of a plan --------------------------------------------------------------------------------


def test_the_tables_of_choices_are_those_of_the_rows():
    wanted = runpy.run_path(str(REFERENCE.parent / "choice_tables.py"))["pages"]()
    assert [path.name for path, text in wanted.items() if path.read_text() != text] == [], "run python docs/choice_tables.py"


# -- recipe -------------------------------------------------------------------------------------------


def recipe_fields() -> dict[str, Any]:
    kinds = {name: _options(field.annotation)[0] for name, field in Recipe.model_fields.items()}
    return {f"{name}.{key}": field for name, kind in kinds.items() for key, field in kind.model_fields.items()}


def test_the_recipe_page_has_every_key_and_no_other():
    found = [names(cells[0])[0] for cells in rows(page("recipe"))]
    assert sorted(found) == sorted(recipe_fields())
    for name in Recipe.model_fields:
        there = [names(cells[0])[0] for cells in rows(section(page("recipe"), f"## {name}"))]
        assert sorted(there) == sorted(key for key in recipe_fields() if key.startswith(f"{name}."))


@pytest.mark.parametrize("cells", rows(page("recipe")), ids=lambda cells: cells[0])
def test_a_recipe_key_has_its_type_and_default(cells: list[str]):
    key = names(cells[0])[0]
    field = recipe_fields()[key]
    kinds = [a for a in _options(field.annotation) if a is not type(None)]
    words = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    assert all(f"`{word}`" in cells[3] for word in words)
    wanted = {"string" if get_origin(kind) is Literal else TYPES[get_origin(kind) or kind] for kind in kinds}
    assert all(word in cells[1] for word in wanted)
    assert cells[2].strip("`") == _default(key, field)


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (types.UnionType, Union) else (annotation,)


def _default(key: str, field: Any) -> str:
    if field.default is PydanticUndefined and field.default_factory is None:
        return "required"
    value = field.default
    if key.startswith("optim.") and value is None:  # the optimizer's own
        optim = {"lr": 1.0, "name": "sgd" if key == "optim.momentum" else "adamw"}
        value = getattr(Recipe.model_validate(SMALL | {"optim": optim}).optim, key.removeprefix("optim."))
    return "–" if value is None else json.dumps(value)


# -- command line -------------------------------------------------------------------------------------


def commands(command: Any, path: str = "fullshard") -> dict[str, Any]:
    inner = getattr(command, "commands", None)
    if inner is None:
        return {path: command}
    return {name: found for key, c in inner.items() for name, found in commands(c, f"{path} {key}").items()}


COMMANDS = commands(typer.main.get_command(app))


def test_the_page_has_every_command_and_no_other():
    assert set(re.findall(r"^## (fullshard .*)$", page("cli"), re.M)) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_has_every_option_and_no_other(name: str):
    options = [p for p in COMMANDS[name].params if p.param_type_name == "option" and p.name != "help"]
    known = {spelling for p in options for spelling in (*p.opts, *p.secondary_opts)}
    assert {word for cells in rows(section(page("cli"), f"## {name}")) for word in names(cells[0], r"--?[\w-]+")} == known


def test_the_page_has_every_choice_that_can_be_fixed():
    (row,) = [cells for cells in rows(page("cli")) if cells[0].startswith("`--fix")]
    assert set(names(row[2])) == {name for name, row in NAMED.items() if row.fixable}


# -- files --------------------------------------------------------------------------------------------


def paths(value: Any, before: str = "") -> set[str]:
    """The keys of a JSON document, `a.b` within tables and `a[].b` within lists of them."""
    if isinstance(value, dict) and value:
        return {path for key, inner in value.items() for path in paths(inner, f"{before}.{key}" if before else key)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {path for inner in value for path in paths(inner, f"{before}[]")}
    return {before}


def test_the_plan_page_has_every_field_and_no_other():
    batch = fullshard.Batch(2, 1, dims="3×224×224")
    precision = fullshard.Precision(
        "bf16", master="bf16", buffers="bf16", float8="rowwise", moments="int8", rounding="stochastic"
    )
    written = {"wire": fullshard.Wire(memory="nccl"), "precision": precision, "kernels": fullshard.Kernels("flash")}
    model = dataclasses.replace(fullshard.presets.describe("llama-nano"), buffers=(Tensor("angles", (4,)),))
    made = fullshard.zero3(model, devices=2, batch=batch, **written)
    table = section(page("plan"), "## Fields").partition("\n### ")[0]
    assert {names(cells[0])[0] for cells in rows(table)} == paths(json.loads(made.to_json()))


def test_the_cluster_page_has_every_field_and_no_other():
    data = json.loads(Cluster.load("8xh100").to_json())
    link = set(data["network"])
    data["network"] = data["node"]["link"] = "a link"
    text = section(page("cluster"), "## File")
    assert {name for cells in rows(text) for name in names(cells[0])} == paths(data)
    assert link == set(names(text.partition("A link has")[2].partition("\n\n")[0])) - {"switch", "mesh", "torus2", "torus3"}
    measured = {name for cells in rows(section(page("cluster"), "## Measured numbers")) for name in names(cells[0])}
    assert measured == {f.name for f in dataclasses.fields(Measured)}


def test_the_checkpoint_page_has_every_key_and_no_other():
    text = section(page("checkpoint"), "## Manifest").partition("| key of `state`")[0]
    written = json.loads(Manifest(0, {}, {}).to_bytes())
    assert {name for cells in rows(text) for name in names(cells[0])} == set(written) - {"checksum"}


def test_the_page_of_token_files_has_every_key_and_no_other(tmp_path):
    with TokenWriter(tmp_path / "tokens", vocab=10, tokenizer="bytes") as writer:
        writer.add([1, 2], [0, 1])
    written = json.loads((tmp_path / "tokens/index.json").read_text())
    found = rows(section(page("token-files"), "## index.json"))
    assert {names(cells[0])[0] for cells in found} == set(written)
    assert set(written["shards"][0]) <= set(names(found[-1][1]))


# -- guides -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [None, "bf16", "int8"])
def test_the_guide_has_the_memory_that_is_predicted_for_moments(moments):
    row = f"`moments={moments}`" if moments else "default"
    shown = re.findall(rf"^\| {row} \| ([\d.]+ GiB) \| ([\d.]+ GiB) \|$", (GUIDES / "fit-a-bigger-model.md").read_text(), re.M)
    fixed = {"strategy": "zero3", "home.optimizer": "device", **({"moments": moments} if moments else {})}
    model, cluster = fullshard.presets.describe("llama3-8b"), Cluster.load("8xh100")
    memory = fullshard.find_plan(model, cluster, sequence=4096, fix=fixed).estimate.device
    assert shown == [(bytes_text(memory.terms["optimizer"]), bytes_text(memory.allocated_bytes))]


# -- Python -------------------------------------------------------------------------------------------


def calls(title: str) -> dict[str, str]:
    """The public names under a heading of the page, each with its arguments as the page writes them."""
    found = [re.match(r"`(\w+)(?:\((.*)\))?`", cells[0]) for cells in rows(section(page("api"), title))]
    return {m[1]: m[2] or "" for m in found if m}


def arguments(text: str) -> list[str]:
    """The names of the arguments in a call."""
    text = re.sub(r"\([^()]*\)", "", text)
    return [part.partition("=")[0].strip(" *") for part in text.split(",") if part.strip(" *")]


def differs(module: Any, title: str) -> dict[str, list[str]]:
    """Calls whose arguments are other than on the page. `…` on the page stands for any."""
    known = {name: getattr(module, name) for name, text in calls(title).items() if text and text != "…"}
    taken = {name: list(inspect.signature(call).parameters) for name, call in known.items()}
    return {name: found for name, found in taken.items() if found != arguments(calls(title)[name])}


def test_the_page_has_every_public_name_and_no_other():
    assert set(calls("## fullshard")) == set(fullshard.__all__)
    assert differs(fullshard, "## fullshard") == {}
    assert differs(fullshard.checkpoint, "## fullshard.checkpoint") == {}


def test_the_page_has_every_public_name_of_the_torch_engine():
    from fullshard import on_torch

    assert set(calls("## fullshard.on_torch")) == set(on_torch.__all__)
    assert differs(on_torch, "## fullshard.on_torch") == {}
