"""Strategies side by side: against counts by hand, the sums that articles print, and the estimates of `plan`."""

import pytest

from fullshard import Batch, Cluster, Description, FullshardError, Precision, ddp, presets, zero3
from fullshard.model.model_by_size import model_of_size, parse_size
from fullshard.planner.estimate import estimate
from fullshard.planner.memory.peak_memory import most_by_term
from fullshard.planner.search.comparison import GROUPS, ComparedPlan, Comparison, compare, cut_batch
from fullshard.planner.search.comparison_text import comparison_text

NANO = presets.describe("llama-nano")


def compared(model: Description | str, cluster: str = "8xh100", **choices) -> Comparison:
    """`choices`: of the batch, and of the comparison."""
    where = Cluster.load(cluster)
    shape = {key: choices.pop(key) for key in ("sequence", "global_batch", "micro_batch", "sync") if key in choices}
    description = presets.describe(model) if isinstance(model, str) else model
    return compare(description, where, cut_batch(where, **shape), **choices)


def by_name(found: Comparison) -> dict[str, ComparedPlan]:
    return {p.name: p for p in found.plans}


@pytest.fixture(scope="module")
def seven() -> Comparison:
    return compared("llama2-7b", sequence=4096)


# -- bytes --------------------------------------------------------------------------------------------


def test_model_state_by_hand(seven):
    """fp32 masters, gradients and two moments: 16 bytes a parameter, and a bf16 copy of 2 where parameters stay gathered."""
    parameters, seven = 6_738_415_616, by_name(seven)
    unit = 2 * parameters / 32  # of unreduced bf16 gradients, at most a block at a time
    for name, ranks in {"ddp": 1, "zero1": 8, "zero2": 8, "zero3": 8}.items():
        most = seven[name].most
        assert most["params"] == pytest.approx(4 * parameters / ranks, rel=1e-4)
        assert most["optimizer"] == pytest.approx(8 * parameters / ranks, rel=1e-4)
        assert 4 * parameters / ranks <= most["gradients"] <= 4 * parameters / ranks + unit
    for name in ("ddp", "zero1", "zero2"):
        assert 2 * parameters <= seven[name].most["gathered"] <= 2 * parameters + 2 * unit  # and the buffer of a gather
    assert seven["zero3"].most["gathered"] <= 3 * unit  # a few blocks at a time
    assert seven["offload"].most["params"] == pytest.approx(2 * parameters / 8, rel=1e-4)  # the bf16 shard alone
    assert seven["offload"].most["optimizer"] == seven["offload all"].most["optimizer"] == 0
    assert seven["offload all"].most["params"] == 0
    assert seven["offload"].estimate.host.allocated_bytes >= 12 * parameters / 8


def test_accumulating_zero1_keeps_whole_gradients():
    found = by_name(compared("llama-125m", global_batch=16))
    parameters = presets.parameters("llama-125m")
    assert found["zero1"].most["gradients"] >= 4 * parameters > 4 * found["zero2"].most["gradients"]


# What articles about FSDP print, in GB: 260 of fp32 parameters for LLaMA 65B and 4 on 64 devices; 700 for GPT-3 and 0.68 on
# 1,024 devices; "4 + 4 + 8" for each billion, and 87.5% less on 8 devices.
@pytest.mark.parametrize(("size", "devices", "whole", "sharded"), [("65B", 64, 260, 4.06), ("175B", 1024, 700, 0.68)])
def test_sums_that_articles_print(size, devices, whole, sharded):
    description = model_of_size(size).description
    plans = [make(description, devices, batch=Batch(1, 64)) for make in (ddp, zero3)]
    found = [most_by_term(plan, description, GROUPS)["params"] / 1e9 for plan in plans]
    assert found == [pytest.approx(whole, rel=0.01), pytest.approx(sharded, rel=0.02)]


def test_the_saving_that_articles_print(seven):
    state = [sum(p.most[term] for term in ("params", "gradients", "optimizer")) for p in seven.plans]
    assert state[0] / 1e9 == pytest.approx(16 * 6.74, rel=0.01)
    assert 1 - state[3] / state[0] == pytest.approx(0.875, abs=0.005)


# -- what is shown is what `plan` says ---------------------------------------------------------------


def test_the_estimates_are_those_of_the_plans(seven):
    description = presets.describe("llama2-7b")
    found = seven.plans[3]
    again = zero3(description, devices=8, batch=found.plan.batch, precision=Precision("bf16", "fp32", "fp32"), compile=True)
    assert found.plan == again
    assert found.estimate == estimate(again, description, Cluster.load("8xh100"))
    assert found.estimate.device.allocated_bytes <= sum(found.most.values())


def test_which_fit_and_what_is_saved(seven):
    found = seven
    assert [p.name for p in found.plans] == ["ddp", "zero1", "zero2", "zero3", "offload", "offload all"]
    assert [p.estimate.fits for p in found.plans] == [False, True, True, True, True, True]
    savings = [found.saving(p) for p in found.plans]
    assert savings[0] == 0
    assert savings == sorted(savings)
    assert found.fastest is not None
    assert found.fastest.name == "zero1"
    assert found.to_dict()["plans"][3]["saving"] == savings[3]


@pytest.mark.parametrize(
    ("cluster", "replicate", "shape"), [("16xh100", None, (2, 8)), ("8xh100", 2, (2, 4)), ("16xh100", 4, (4, 4))]
)
def test_hybrid_on_several_nodes_or_if_asked(cluster, replicate, shape):
    mesh = by_name(compared(NANO, cluster, sequence=16, replicate=replicate))["hybrid"].plan.mesh
    assert (mesh.replicate, mesh.shard) == shape


def test_cpus_have_no_other_home_and_tpus_run_on_jax():
    on_cpu = compared(NANO, "4xcpu", sequence=16)
    assert [p.name for p in on_cpu.plans] == ["ddp", "zero1", "zero2", "zero3"]
    assert (on_cpu.precision.compute, on_cpu.compile) == ("fp32", False)
    assert "in MiB" in comparison_text(on_cpu)
    assert not any("workspace" in p.estimate.device.terms for p in on_cpu.plans)  # cuBLAS's
    on_tpu, twice = (compared(NANO, "8xv5p", sequence=16, global_batch=n) for n in (8, 16))
    assert "JAX engine" in comparison_text(on_tpu)
    once, both = by_name(on_tpu)["zero1"].wire, by_name(twice)["zero1"].wire
    assert twice.batch.accumulate == 2  # JAX reduces the gradients of each, and gathers once
    assert (both.gather, both.reduce) == (once.gather, 2 * once.reduce)


def test_sync_last_is_for_those_that_have_a_choice():
    every, late = (by_name(compared(NANO, "4xcpu", sequence=16, global_batch=8, sync=s)) for s in ("every", "last"))
    assert late["ddp"].wire.copies == every["ddp"].wire.copies / 2
    assert late["zero3"].wire.reduce == every["zero3"].wire.reduce / 2
    assert late["zero1"].wire == every["zero1"].wire


def test_the_table_is_narrow_and_complete():
    found = compared(model_of_size("65B").description, "64xh100", sequence=4096, remat="full")
    text = comparison_text(found, "80 layers")
    assert max(map(len, text.splitlines())) <= 100
    rows = {line[:21].strip(): line[21:].split() for line in text.splitlines()}
    assert len(rows["peak, reserved"]) == len(rows["params"]) == 7
    assert rows["fits"] == ["no", "no", "no", "yes", "no", "yes", "yes"]  # a copy of 65B is too much for a node
    assert rows["sent in a step"][0] == f"{found.plans[0].wire.total / 2**30:.2f}"


# -- sizes alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("7B", "llama2-7b"),
        ("7b", "llama2-7b"),
        ("8B", "llama3-8b"),
        ("13B", "llama2-13b"),
        ("65B", "llama-65b"),
        ("175B", "gpt3-175b"),
        ("1.5B", "llama-1.5b"),
        ("350M", "gpt2-medium"),
        ("30B", "llama-33b with 55 of its 60 layers"),
        ("10B", "llama2-13b with 30 of its 40 layers"),
    ],
)
def test_the_model_of_a_size(text, title):
    found = model_of_size(text)
    assert found.description.model == title
    assert found.description.numel == pytest.approx(parse_size(text), rel=0.05)
    assert f"{sum(u.kind == 'block' for u in found.description.units)} layers, dim " in found.shape


@pytest.mark.parametrize("text", ["7Q", "7", "B", "0B", "-1B", "1.2.3B", "1e9", "", "7BB"])
def test_no_size(text):
    with pytest.raises(FullshardError, match="is no size of a model; write a number with K, M, B or T, such as 7B"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [("2T", "no preset has 2T parameters; the largest, llama3-405b, has 405.85B"), ("40M", "comes within 10% of 40M; write")],
)
def test_sizes_without_a_model(text, words):
    with pytest.raises(FullshardError) as caught:
        model_of_size(text)
    assert words in str(caught.value)


# -- refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"global_batch": 12}, "a global batch of 12 cannot be cut into micro-batches of 1 for 8 ranks; give a multiple of 8"),
        ({"global_batch": 0}, "a global batch of 0 cannot be cut"),
        ({"micro_batch": 3, "global_batch": 8}, "micro-batches of 3 for 8 ranks; give a multiple of 24"),
        ({"micro_batch": 0}, "the micro-batch must be at least 1, not 0"),
        ({"global_batch": 2**31}, "268435456 micro-batches in a step are too many to predict; give a smaller global batch"),
        ({"micro_batch": 10**12}, "a micro-batch of 1000000000000 × 1024 tokens is too large to predict; give fewer"),
        ({"sequence": 0}, "batch.sequence must be a positive integer"),
        ({"sync": "last"}, "has no effect with batch.accumulate = 1"),
        ({"replicate": 3}, "hybrid cannot keep 3 copies on 8 devices; give a divisor of 8 above 1"),
        ({"replicate": 0}, "hybrid cannot keep 0 copies on 8 devices; give a divisor of 8 above 1"),
        ({"replicate": 1}, "hybrid cannot keep 1 copies on 8 devices; give a divisor of 8 above 1"),
    ],
)
def test_refused(choices, words):
    with pytest.raises(FullshardError) as caught:
        compared(NANO, "8xh100", **choices)
    assert words in str(caught.value)
