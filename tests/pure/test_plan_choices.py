"""What a recipe leaves open is chosen for the devices that are there, said, stored, and kept by a resume."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

import fullshard as fs
from fullshard.cluster.topology import Cluster
from fullshard.planner.device_limits import slow_precision
from fullshard.planner.estimate import estimate
from fullshard.runs.announcement import announcement
from fullshard.runs.prepare.describe_model import describe_model
from fullshard.runs.prepare.open_inputs import Inputs
from fullshard.runs.prepare.plan_choices import asked_of, choice_lines, kept_choices
from fullshard.runs.prepare.prepare import Prepared
from fullshard.runs.prepare.recipe_plan import RecipePlan, plan_recipe
from fullshard.runs.recipe.recipe import Recipe, make_recipe
from fullshard.runs.run_directory import write_run


@dataclass
class Describes:
    """Stands in for an engine, and for its ranks and models: these are presets, by name."""

    name: str = "torch"
    traces: bool = True

    @property
    def model(self) -> "Describes":
        return self

    @property
    def ranks(self) -> "Describes":
        return self

    def describe(self, model: str, **_: Any) -> fs.Description:
        return fs.presets.describe(model)

    def trace_costs(self, model: str, **_: Any) -> fs.Description:
        if not self.traces:
            raise fs.FullshardError("it cannot be traced")
        return fs.presets.describe(model)

    def versions(self) -> dict[str, str]:
        return {}


def recipe(model: str = "llama-1.5b", batch: int = 4, **sections: Any) -> Recipe:
    train = {"steps": 1, "global_batch": batch} | sections.pop("train", {})
    data = {"path": "tokens", "sequence": 4096}
    return make_recipe({"model": {"name": model}, "data": data, "optim": {"lr": 1e-3}, "train": train, **sections}, "recipe")


def found(asked: Recipe, where: str, kept: dict[str, Any] | None = None, engine: Any = None, model: str = "") -> RecipePlan:
    return planned(asked, Cluster.load(where), kept, engine or Describes(), model)


def planned(
    asked: Recipe, cluster: Cluster, kept: dict[str, Any] | None = None, engine: Any = None, model: str = ""
) -> RecipePlan:
    engine = engine or Describes()
    question = asked_of(asked, cluster, kept, engine.name)
    return plan_recipe(question, describe_model(question, model or asked.model.name, None, engine))


def made_by(plan: RecipePlan, origin: str) -> set[str]:
    return {key for key, choice in plan.choices.items() if choice.origin == origin}


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_recipe_without_a_plan_gets_what_an_expert_would_choose(engine):
    best = found(recipe(), "1xh200", engine=Describes(engine))
    assert best.plan.precision == fs.Precision("bf16")  # fp32 masters, nothing that rounds more
    assert best.plan.compile
    assert best.plan.wire == fs.Wire()
    assert {u.remat for u in best.plan.units} == {"none"}
    assert (best.plan.batch.micro_batch, best.choices["compute"].value) == (4, "bf16")
    assert not made_by(best, "given")
    assert {"strategy", "compute", "compile", "remat", "micro_batch"} <= made_by(best, "chosen")


@pytest.mark.parametrize(
    "plan",
    [
        {"strategy": "zero3"},
        {"strategy": "ddp"},
        {"strategy": "hybrid", "replicate": 2},
        {"strategy": "hpz", "reshard": 2},
        {"strategy": "mixed", "keep_whole": ["embed"]},
        {"strategy": "zero3", "remat_every": 2, "remat": "full"},
        {"names": ["*.mlp"]},  # without a strategy: zero3
    ],
    ids=str,
)
def test_a_named_strategy_leaves_the_rest_to_the_planner(plan):
    best = found(recipe(plan=plan, batch=16), "8xh100")
    assert (best.plan.precision.compute, best.plan.compile) == ("bf16", True)
    assert set(plan) <= made_by(best, "given") | {"names"}
    assert {"compute", "compile"} <= made_by(best, "chosen")
    assert best.choices["strategy"].value == plan.get("strategy", "zero3")
    assert best.estimate is not None
    assert best.estimate.fits


@pytest.mark.parametrize("plan", [{}, {"strategy": "zero3"}, {"strategy": "mixed", "keep_whole": ["embed"]}], ids=str)
def test_a_cpu_computes_in_fp32_which_it_does_faster(plan):
    tiny = recipe("llama-nano", plan=plan)
    best = found(tiny.model_copy(update={"data": tiny.data.model_copy(update={"sequence": 16})}), "2xcpu")
    assert (best.plan.precision, best.plan.compile) == (fs.Precision(), False)


def test_the_rates_decide_and_not_the_name():
    slow = Cluster.load("1xh200")
    slow = replace(slow, device=replace(slow.device, peak=replace(slow.device.peak, bf16=30e12)))
    best = planned(recipe(), slow)
    assert best.plan.precision.compute == "fp32"
    assert fs.find_plan(fs.presets.describe("llama-1.5b"), slow, sequence=4096).plan.precision.compute == "fp32"


def test_what_is_given_stays():
    plan = {"strategy": "auto", "compute": "fp32", "remat": "full", "compile": False, "prefetch": 1, "sync": "every"}
    best = found(recipe(plan=plan, train={"micro_batch": 1}), "1xh200")
    made = best.plan
    assert (made.precision.compute, made.compile, made.prefetch, made.batch.micro_batch) == ("fp32", False, fs.Prefetch(), 1)
    assert {u.remat for u in made.units if ".layers." in u.name} == {"full"}
    assert {"compute", "remat", "compile", "prefetch", "sync", "micro_batch"} == made_by(best, "given")


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", [{"strategy": "mixed", "keep_whole": ["head"]}, {"strategy": "zero3"}], ids=str)
def test_homes_leave_the_device_if_nothing_else_fits(plan):
    best = found(recipe("llama3-8b", plan=plan), "1xh100" if plan["strategy"] == "zero3" else "2xl40s")
    assert "host" in {u.home.optimizer for u in best.plan.units}
    assert best.estimate is not None
    assert best.estimate.fits
    assert "home.optimizer" in made_by(best, "chosen")
    given = found(recipe("llama3-8b", plan=plan, home={"optimizer": "device"}), "1xh100" if len(plan) == 1 else "2xl40s")
    assert {u.home.optimizer for u in given.plan.units} == {"device"}


def test_a_named_strategy_that_fits_nowhere_is_made_as_it_is_named():
    best = found(recipe("llama3-70b", plan={"strategy": "ddp"}), "4xl40s")
    assert {u.layout for u in best.plan.units} == {"replicated"}
    assert best.estimate
    assert not best.estimate.fits
    with pytest.raises(fs.FullshardError, match="nothing fits"):
        found(recipe("llama3-70b", plan={"strategy": "auto", "limit": "1GiB"}), "4xl40s")


def test_a_model_that_cannot_be_traced():
    asked, blind = recipe("own.py:make"), Describes(traces=False)
    best = found(asked, "1xh200", engine=blind, model="llama-1.5b")
    assert best.choices["strategy"].value == "zero3"
    assert best.plan.precision.compute == "bf16"
    assert found(recipe("own.py:make", plan={"strategy": "zero2"}), "1xh200", engine=blind, model="llama-1.5b").plan.units
    with pytest.raises(fs.FullshardError, match="it cannot be traced"):
        found(recipe("own.py:make", plan={"strategy": "auto"}), "1xh200", engine=blind, model="llama-1.5b")


def test_a_resume_keeps_what_changes_results_on_other_devices():
    before = found(recipe("llama-125m", plan={"strategy": "zero3"}, batch=16), "8xh100", kept=None).plan
    kept = kept_choices(before.to_dict())
    tiny = {"strategy": "zero3", "cluster": "4xcpu"}
    after = found(recipe("llama-125m", plan=tiny, batch=16), "4xcpu", kept=kept)
    assert after.plan.precision == before.precision
    assert after.plan.compile
    assert {"compute", "compile"} <= made_by(after, "kept")
    told = found(recipe("llama-125m", plan=tiny | {"compute": "fp32"}, batch=16), "4xcpu", kept=kept)
    assert told.plan.precision.compute == "fp32"
    assert "compute" in made_by(told, "given")
    assert kept_choices(None) == kept_choices({"precision": 3}) == {}


def test_a_resume_cuts_a_step_as_before_where_the_ranks_allow_it():
    plan = fs.zero3(fs.presets.describe("llama-nano"), devices=2, batch=fs.Batch(2, 4096, 4, "last"))
    kept = kept_choices(plan.to_dict())
    same, other = found(recipe("llama-nano", 16), "2xcpu", kept), found(recipe("llama-nano", 12), "4xcpu", kept)
    assert (same.plan.batch.micro_batch, same.plan.batch.sync) == (2, "last")
    assert {"micro_batch", "sync"} <= made_by(same, "kept")
    assert "micro_batch" in made_by(other, "chosen")


def test_it_is_printed_and_written(tmp_path):
    asked = recipe(plan={"strategy": "zero3", "remat": "full"})
    best = found(asked, "1xh200")
    lines = "\n".join(choice_lines(best.choices))
    assert lines.startswith("given       strategy zero3, remat full\nchosen      ")
    assert "compute bf16" in lines

    class Data:
        def about(self) -> dict[str, Any]:
            return {}

    inputs = Inputs(None, None, Data(), None, None)  # type: ignore[arg-type]
    prepared = Prepared(**vars(inputs), **vars(best), recipe=asked, engine=Describes())  # type: ignore[arg-type]
    assert lines in announcement(prepared, tmp_path, None)
    write_run(tmp_path, prepared)
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["choices"]["compute"] == {"value": "bf16", "origin": "chosen"}
    assert data["choices"]["remat"] == {"value": "full", "origin": "given"}
    read = fs.Plan.load(tmp_path / "plan.json")
    assert (read, read.digest) == (best.plan, best.plan.digest)


def test_a_plan_of_python_is_literal_and_says_what_it_leaves_on_the_table():
    h200, cpu = Cluster.load("1xh200").device, Cluster.load("1xcpu").device
    assert fs.zero3(fs.presets.describe("llama-nano"), devices=1).precision.compute == "fp32"
    said = "the plan computes in fp32; bf16 would be up to 15× faster here (precision=Precision('bf16'))"
    assert slow_precision(fs.Precision(), h200) == said
    assert slow_precision(fs.Precision("bf16"), h200) is slow_precision(fs.Precision(), cpu) is None


def test_utilisation_counts_against_the_fastest_dtype_of_training():
    where, model = Cluster.load("1xh200"), fs.presets.describe("llama-1.5b")
    plans = [fs.ddp(model, 1, precision=fs.Precision(kind), batch=fs.Batch(1, 1024)) for kind in ("fp32", "bf16")]
    slow, fast = (estimate(plan, model, where) for plan in plans)
    assert slow.mfu / fast.mfu == pytest.approx(slow.tokens_per_second / fast.tokens_per_second, rel=0.02)
    peak = replace(where.device.peak, bf16=1e12)
    assert (peak.fastest, peak.training) == ("fp32", where.device.peak.fp32)


def test_a_run_of_torch_goes_on_with_jax():
    """JAX has no late reductions."""
    plan = fs.zero3(fs.presets.describe("llama-nano"), devices=2, batch=fs.Batch(2, 4096, 4, "last"))
    found_there = found(recipe("llama-nano", 16), "2xcpu", kept_choices(plan.to_dict()), engine=Describes("jax"))
    assert (found_there.plan.batch.micro_batch, found_there.plan.batch.sync) == (2, "every")
