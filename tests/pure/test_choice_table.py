"""A choice of a plan is declared once. One that is invented is then in all that follows from the table."""

import subprocess
import sys
from pathlib import Path

import pytest

import fullshard
from fullshard.plan.choice_table import NAMED, TABLE

HOUSE = Path(fullshard.__file__).parent
PLACE = "    update: Kernel = choice(\n"
ROW = """    router: Kernel = choice(
        "auto",
        "What sends tokens to experts.",
        label="Router",
        absent=True,
        idle_in_plan=lambda plan: ": there are no routers; leave it out" if plan.mesh.shard == 3 else "",
    )
"""
# Run in a process that has the invented row.
ASKED = {
    "recipe": """
from fullshard.runs.recipe.recipe import make_recipe
tree = {"model": {"name": "m"}, "data": {"path": "d", "sequence": 8}, "optim": {"lr": 1.0}}
tree["train"] = {"steps": 1, "global_batch": 1}
print(make_recipe(tree | {"plan": {"router_kernel": "fused"}}, "r").plan.router_kernel)
try:
    make_recipe(tree | {"plan": {"router_kernel": "fast"}}, "r")
except fs.FullshardError as error:
    print(error)
""",
    "option": """
import json
from typer.testing import CliRunner
from fullshard.commands.cli import app
made = CliRunner().invoke(app, "plan llama-nano --devices 2 --router-kernel torch --json".split())
print(json.loads(made.stdout)["kernels"])
print(CliRunner().invoke(app, "plan llama-nano --cluster 2xh100 --router-kernel torch".split()).exception)
""",
    "fix": """
print(fs.find_plan(nano, fs.Cluster.load("2xh100"), sequence=16, fix={"router_kernel": "fused"}).plan.kernels)
""",
    "page": """
from fullshard.observe.page.plan_request import PlanQuestion, controls
print([control for control in controls() if control["name"] == "router_kernel"])
print(PlanQuestion.parse({"model": "m", "cluster": "c", "router_kernel": "fused"}).command)
""",
    "JSON": """
plan = fs.zero3(nano, 2, kernels=fs.Kernels(router="fused"))
print(fs.Plan.from_json(plan.to_json()) == plan, "router" in fs.zero3(nano, 2, kernels=fs.Kernels("flash")).to_json())
print(fs.zero3(nano, 2).diff(plan))
""",
    "reference": """
import runpy
text = "".join(runpy.run_path("docs/choice_tables.py")["pages"]().values())
print([line for line in text.splitlines() if "router" in line and not line.startswith("| `--fix")])
""",
    "refusal": """
from fullshard.plan.choice_table import refuse_limits
for make in (
    lambda: refuse_limits(fs.zero3(nano, 2, kernels=fs.Kernels(router="fused")), "jax"),
    lambda: fs.find_plan(nano, fs.Cluster.load("2xh100"), sequence=16, fix={"router_kernel": "fused"}, engine="jax"),
    lambda: fs.zero3(nano, 3, kernels=fs.Kernels(router="fused")),
):
    try:
        make()
    except fs.FullshardError as error:
        print(error)
""",
}
WANTED = {
    "recipe": ["fused", "r: plan.router_kernel = 'fast': input should be 'auto', 'fused' or 'torch'"],
    "option": [
        "{'attention': 'auto', 'loss': 'auto', 'router': 'torch', 'update': 'auto'}",
        "--router-kernel has no effect with --cluster; write --fix router_kernel=torch",
    ],
    "fix": ["attention auto, loss auto, router fused, update auto"],
    "page": [
        "[{'name': 'router_kernel', 'label': 'Router', 'help': 'What sends tokens to experts.', "
        "'values': ['auto', 'fused', 'torch']}]",
        "fullshard plan m --cluster c --sequence 1024 --fix router_kernel=fused",
    ],
    "JSON": ["True False", "['kernels.router: auto → fused']"],
    "reference": [
        "['| `plan.router_kernel` | string | `\"auto\"` | What sends tokens to experts: `auto`, `fused` or `torch`. |', "
        "'| `kernels.router` | string | `\"auto\"` | What sends tokens to experts: `auto`, `fused` or `torch`. |', "
        "'| `--router-kernel WORD` | auto | What sends tokens to experts: `auto`, `fused` or `torch`. |']"
    ],
    "refusal": [
        "kernels (attention auto, loss auto, router fused, update auto) has no effect on JAX: XLA chooses kernels; leave it out",
        "router_kernel = 'fused' has no effect on JAX: XLA chooses kernels; leave it out",
        "kernels.router = 'fused' has no effect: there are no routers; leave it out",
    ],
}


@pytest.fixture(scope="module")
def invented(tmp_path_factory) -> dict[str, list[str]]:
    """What is said of an invented choice: the package with one file changed, the others linked."""
    root = tmp_path_factory.mktemp("invented")
    (root / "docs").symlink_to(HOUSE.parent / "docs")
    link(HOUSE, root / "fullshard", but="plan")
    link(HOUSE / "plan", root / "fullshard/plan", but="choices.py")
    text = (HOUSE / "plan/choices.py").read_text()
    assert text.count(PLACE) == 1
    (root / "fullshard/plan/choices.py").write_text(text.replace(PLACE, ROW + PLACE))
    parts = [f"print('= {name}')\n{code}" for name, code in ASKED.items()]
    script = "\n".join(["import fullshard as fs", "nano = fs.presets.describe('llama-nano')", *parts])
    ran = subprocess.run([sys.executable, "-c", script], cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said = [part.partition("\n") for part in ran.stdout.removeprefix("= ").split("\n= ")]
    return {name: lines.strip().splitlines() for name, _, lines in said}


def link(source: Path, target: Path, but: str) -> None:
    target.mkdir()
    for path in source.iterdir():
        if path.name not in (but, "__pycache__"):
            (target / path.name).symlink_to(path)


@pytest.mark.parametrize("where", ASKED)
def test_an_invented_choice_is_there(invented, where):
    assert invented[where] == WANTED[where]


def test_names_and_options_are_unique():
    assert len(NAMED) == sum(bool(row.name) for row in TABLE)
    assert len({row.flag for row in NAMED.values()}) == len(NAMED)
    assert len({row.path for row in TABLE if row.path}) == sum(bool(row.path) for row in TABLE)
