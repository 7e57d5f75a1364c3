"""The recipe's keys for a plan make the plan that they say; the same choices on the command line and in a search."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import fullshard as fs
from fullshard.cluster.topology import Cluster
from fullshard.commands.cli import app
from fullshard.model.description import Tensor
from fullshard.runs.prepare.recipe_plan import make_plan
from fullshard.runs.recipe.recipe import load_recipe

SMALL = """
plan = "zero3"
[model]
name = "llama-nano"
[data]
path = "tokens"
sequence = 16
[optim]
lr = 1e-3
[train]
steps = 10
global_batch = 4
"""
NANO = fs.presets.describe("llama-nano")


def load(tmp_path, *overrides: str):
    (tmp_path / "r.toml").write_text(SMALL)
    return load_recipe(tmp_path / "r.toml", list(overrides))


def made(tmp_path, *overrides: str) -> fs.Plan:
    return make_plan(load(tmp_path, *overrides), NANO, 4)


def test_dtypes(tmp_path):
    buffered = dataclasses.replace(NANO, buffers=(Tensor("angles", (4,)),))
    found = make_plan(load(tmp_path, "plan.compute=bf16", "plan.output=fp32", "plan.buffers=bf16"), buffered, 4).precision
    assert found == fs.Precision("bf16", "fp32", "fp32", "fp32", "bf16")
    assert str(found) == "compute bf16, reduce fp32, master fp32, output fp32, buffers bf16"
    assert "buffers" not in made(tmp_path).to_dict()["precision"]


def test_depths(tmp_path):
    assert made(tmp_path, "plan.prefetch=2").prefetch == fs.Prefetch(2, 2)
    assert made(tmp_path, "plan.prefetch=2", "plan.prefetch_backward=3").prefetch == fs.Prefetch(2, 3)
    assert made(tmp_path, "plan.prefetch_forward=4").prefetch == fs.Prefetch(4, 1)


def test_wire(tmp_path):
    given = ("plan.wire_gather=int8", "plan.wire_reduce=fp8", "plan.wire_block=64", "plan.error_feedback=true")
    assert made(tmp_path, *given).wire == fs.Wire("int8", "fp8", 64, error_feedback=True)
    assert made(tmp_path, "plan.wire_memory=symmetric").wire == fs.Wire(memory="symmetric")
    assert made(tmp_path).wire == fs.Wire()


REFUSED = [
    (("plan.wire_gather=int4",), "plan.wire_gather = 'int4': input should be 'plain', 'int8' or 'fp8'"),
    (("plan.wire_blok=3",), "unknown key plan.wire_blok"),
    (("plan.error_feedback=true",), "error_feedback has no effect with wire_reduce = 'plain'; write wire_reduce = 'int8'"),
    (("plan.wire_memory=nccl", "plan.wire_gather=int8"), "wire_memory has no effect on quantised messages"),
    (("plan.wire_block=64",), "wire_block has no effect: gathers and reductions are plain; leave it out"),
    (
        ("plan.prefetch=2", "plan.prefetch_forward=2", "plan.prefetch_backward=2"),
        "prefetch has no effect beside prefetch_forward and prefetch_backward; leave it out",
    ),
    (("plan=auto", "plan.classes=['Block']"), "classes has no effect with strategy = 'auto'; name the strategy"),
    (("plan=auto", "plan.output=fp32"), "output has no effect with strategy = 'auto'; name the strategy"),
    (("plan=a.json", "plan.wire_gather=int8"), "wire_gather has no effect beside file; change the plan file instead"),
]


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused(tmp_path, overrides, sentence):
    with pytest.raises(fs.FullshardError) as caught:
        load(tmp_path, *overrides)
    assert sentence in str(caught.value)


def test_the_same_on_the_command_line(tmp_path):
    options = "--wire-gather int8 --wire-reduce fp8 --wire-block 64 --error-feedback --prefetch-backward 3"
    words = ["plan", "llama-nano", "--devices", "4", "--sequence", "16", *options.split(), "--output-dtype", "fp32", "--json"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    given = ("plan.wire_gather=int8", "plan.wire_reduce=fp8", "plan.wire_block=64", "plan.error_feedback=true")
    more = ("plan.prefetch_backward=3", "plan.output=fp32")
    assert fs.Plan.from_dict(json.loads(ended.stdout)) == made(tmp_path, *given, *more)


def test_a_search_keeps_them_and_never_quantises_by_itself():
    cluster, fix = Cluster.load("4xh100"), {"strategy": "zero3", "remat": "none"}
    found = fs.find_plan(NANO, cluster, sequence=16, fix=fix | {"wire_gather": "int8", "prefetch_backward": 2})
    assert found.plan.wire == fs.Wire("int8")
    assert found.plan.prefetch == fs.Prefetch(1, 2)
    assert fs.find_plan(NANO, cluster, sequence=16, fix=fix).plan.wire == fs.Wire()
    big, many = fs.presets.describe("llama3-8b"), Cluster.load("16xh100")
    many = dataclasses.replace(many, network=dataclasses.replace(many.network, bandwidth=many.network.bandwidth / 6))
    fix |= {"wire_gather": "int8", "wire_reduce": "int8"}
    assert fs.find_plan(big, many, sequence=4096, fix=fix).plan.prefetch == fs.Prefetch(2, 2)  # where a search would go deeper
    found = fs.find_plan(big, many, sequence=4096, fix=fix | {"prefetch_forward": 1})
    assert found.plan.prefetch == fs.Prefetch(1, 1)
    with pytest.raises(fs.FullshardError, match="wire_gather = 'int8' has no effect on JAX: XLA's collectives are plain"):
        fs.find_plan(NANO, cluster, sequence=16, fix={"wire_gather": "int8"}, engine="jax")
    with pytest.raises(fs.PlanError, match=r"has no effect: mesh\.shard = 1"):
        fs.find_plan(NANO, Cluster.load("1xh100"), sequence=16, fix={"wire_gather": "int8"})
