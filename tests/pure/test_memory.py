"""Predicted peaks of presets, without torch, against peaks measured on an H200; and the allocator's rules."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fullshard as fs
import fullshard.model.presets
from fullshard.model.reduced_description import reduced_description
from fullshard.planner.memory.allocator import Allocator, replay
from fullshard.planner.memory.peak_memory import peak_bytes, predict
from fullshard.planner.search.exact_estimates import FullModel
from fullshard.planner.search.plan_space import plan_request

RESULTS = Path(__file__).parents[2] / "benchmarks/results/2026-11-20-memory-h200.json"
MiB = 1 << 20
# Presets as they are. Those with other layers or trained parameters need a trace: `python -m benchmarks.memory_again`.
ROWS = [
    row
    for row in json.loads(RESULTS.read_text())["rows"]
    if row["case"]["model"] in fs.presets.PRESETS and not row["case"]["change"] and row["case"]["trained"] == "all"
]
HOMES = [row for row in json.loads((RESULTS.parent / "2026-11-18-homes-h200.json").read_text())["rows"] if row["call"] > 1]
STEPS = json.loads((RESULTS.parent / "2026-11-18-resident-h200.json").read_text())["calls"][3]


def plan(case: dict, description: fs.Description) -> fs.Plan:
    return fs.strategy(
        case["strategy"],
        description,
        **case["arguments"],
        precision=fs.Precision(compute=case["compute"], reduce=case["reduce"]),
        batch=fs.Batch(*case["batch"], case["accumulate"], case["sync"]),
        remat=case["remat"],
        compile=case["compile"],
    )


def test_a_step_that_repeats_the_one_before_need_not_be_played():
    """A tensor that rests, one that outlives its step, and two that come and go."""
    deltas, tensors, starts, kept = [8 * MiB, 20 * MiB], [1, 2], [0], 2
    for first in (3, 6, 9):
        starts.append(len(deltas))
        deltas += [30 * MiB, -20 * MiB, 12 * MiB, -12 * MiB, 20 * MiB, -30 * MiB]
        tensors += [first, kept, first + 1, first + 1, first + 2, first]
        kept = first + 2
    played, spared = (replay(deltas, tensors, [0] * len(deltas), starts, alike=alike) for alike in (False, True))
    assert played == spared
    assert len(played) == 4


def test_a_few_blocks_lose_no_more_to_the_allocator_than_all_of_them():
    description, where = fs.presets.describe("llama3-8b"), fs.Cluster.named("8xh100")
    full = FullModel(plan_request(description, where, 4096, 16, {}, None, "chunked", fs.AdamW()))
    for remat, home in (("full", fs.Home("host", "host", "host")), ("selective", fs.Home()), ("none", fs.Home("host", "host"))):
        one = fs.zero3(
            description,
            devices=8,
            batch=fs.Batch(2, 4096),
            precision=fs.Precision(compute="bf16"),
            remat=remat,
            compile=True,
            home=home,
        )
        whole = predict(one, description)
        assert 0 < full.slack(one) <= whole.reserved - whole.allocated


def test_there_are_rows_to_hold_predictions_against():
    assert len(ROWS) + len(HOMES) == 20


@pytest.mark.parametrize("row", HOMES, ids=lambda r: f"{r['case']}, {r['loss']} loss, {r['accumulate']} micro-batches")
def test_predicted_peaks_are_those_of_state_in_host_memory(row):
    description, resident = fs.presets.describe("llama-3.6b"), row["case"] == "resident"
    more = {} if resident else {"home": fs.Home(optimizer="host"), "staging": row["staging"], "cpu_share": row["cpu_share"]}
    shape = {"precision": fs.Precision("bf16"), "batch": fs.Batch(2, 4096, row["accumulate"]), "remat": "full"}
    found = predict(fs.zero3(description, devices=1, **shape, **more), description, loss=row["loss"])
    assert found.allocated / (1 << 30) == pytest.approx(row["peak_gib"], rel=0.0001)
    assert found.reserved / (1 << 30) == pytest.approx(row["reserved_gib"], rel=0.01)


KERNELS = {"fullshard": {}} | {
    f"with {k}={v}": {k: v} for k, v in (("loss", "torch"), ("update", "torch"), ("attention", "flash"))
}


@pytest.mark.parametrize("name", KERNELS)
def test_predicted_peaks_are_those_of_the_plans_kernels(name):
    (row,) = (row for row in STEPS["1.5B, 4 x 4096"] if row["row"] == name)
    description, kernels = fs.presets.describe("llama-1.5b"), fs.Kernels(**KERNELS[name])
    shape = {"precision": fs.Precision("bf16"), "batch": fs.Batch(4, 4096), "compile": True}
    found = predict(fs.ddp(description, devices=1, kernels=kernels, **shape), description)
    assert found.allocated / (1 << 30) == pytest.approx(row["peak_gib"], rel=0.001)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r["name"])
def test_predicted_peaks_are_those_measured(row):
    description = fs.presets.describe(row["case"]["model"])
    found = predict(plan(row["case"], description), description, loss=row["case"]["loss"])
    assert found.allocated == pytest.approx(row["allocated"], rel=0.001)
    assert found.reserved == pytest.approx(row["reserved"], rel=0.01)
    quick = predict(plan(row["case"], description), description, loss=row["case"]["loss"], reserved=False)
    assert quick.allocated == pytest.approx(row["allocated"], rel=0.005)
    assert sum(quick.terms.values()) == quick.allocated


def test_planning_a_preset_needs_no_torch():
    program = (
        "import sys, fullshard as fs, fullshard.model.presets\n"
        "from fullshard.planner.memory.peak_memory import predict\n"
        "d = fs.presets.describe('llama3-405b')\n"
        "plan = fs.zero3(d, devices=512, precision=fs.Precision(compute='bf16'), batch=fs.Batch(1, 8192), remat='full')\n"
        "assert predict(plan, d).allocated > 0 and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_more_ranks_hold_less_and_more_tokens_need_more():
    d = fs.presets.describe("llama3-8b")
    peaks = [_peak(d, devices=n) for n in (1, 2, 8, 64, 512)]
    assert peaks == sorted(peaks, reverse=True)
    assert _peak(d, batch=fs.Batch(2, 4096)) > _peak(d, batch=fs.Batch(1, 4096))
    assert _peak(d, remat="full") < _peak(d, remat="selective") < _peak(d, remat="none")


def _peak(d: fs.Description, devices: int = 8, batch: fs.Batch = fs.Batch(1, 4096), remat: str = "none") -> int:  # noqa: B008
    bf16 = fs.Precision(compute="bf16")
    return predict(fs.zero3(d, devices=devices, precision=bf16, batch=batch, remat=remat), d, reserved=False).allocated


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("loss", ["chunked", "plain"])
def test_the_searchs_quick_peak_is_the_peak(strategy, remat, loss):
    description = reduced_description(fs.presets.describe("llama3-8b"), 3)
    for batch, compiled in ((fs.Batch(2, 256), False), (fs.Batch(1, 512, 3), True)):
        made = fs.strategy(strategy, description, devices=4, batch=batch, remat=remat, compile=compiled)
        for one in (made, made.change("*", home=fs.Home("host", "host"))):
            peak = predict(one, description, loss=loss, reserved=False)
            level = peak_bytes(one, description, loss=loss)
            assert (level.device, level.host) == (peak.allocated, peak.host)


def test_what_cannot_be_predicted_is_refused():
    d = fs.presets.describe("llama-nano")
    with pytest.raises(fs.FullshardError, match="tensor = 2"):
        predict(fs.zero3(d, devices=2, tensor=2), d)
    with pytest.raises(fs.FullshardError, match="unit head"):
        predict(fs.zero3(d, devices=2).change("head", remat="full"), d)


# -- the allocator -----------------------------------------------------------------------------------------


def test_small_and_large_requests_come_from_their_own_segments():
    a = Allocator()
    a.allocate(100, 0)
    assert (a.allocated, a.reserved) == (512, 2 * MiB)
    a.allocate(MiB + 1, 0)
    assert (a.allocated, a.reserved) == (512 + MiB + 512, 22 * MiB)
    a.allocate(25 * MiB + 5, 0)  # what fits nowhere gets a segment of its own size, in steps of 2 MiB
    assert a.reserved == 48 * MiB


def test_blocks_are_reused_on_their_stream_only():
    a = Allocator()
    a.free(a.allocate(50 * MiB, 0))
    a.allocate(50 * MiB, 1)
    assert a.reserved == 100 * MiB
    a.allocate(40 * MiB, 0)
    a.allocate(10 * MiB, 0)
    assert a.reserved == 100 * MiB


def test_an_end_of_a_mebibyte_or_less_is_not_split_off():
    a = Allocator()
    a.free(a.allocate(50 * MiB, 0))
    a.allocate(49 * MiB, 0)
    assert a.allocated == 50 * MiB


def test_free_neighbours_become_one_block():
    a = Allocator()
    whole = a.allocate(60 * MiB, 0)
    a.free(whole)
    three = [a.allocate(20 * MiB, 0) for _ in range(3)]
    for block in (three[0], three[2], three[1]):
        a.free(block)
    a.allocate(60 * MiB, 0)
    assert (a.allocated, a.reserved) == (60 * MiB, 60 * MiB)


def test_stretches_have_peaks_of_their_own():
    peaks = replay([20 * MiB, 30 * MiB, -30 * MiB, 10 * MiB], [1, 2, 2, 3], [0, 0, 0, 0], [0, 3])
    assert peaks == [(50 * MiB, 50 * MiB), (30 * MiB, 50 * MiB)]


def test_of_two_blocks_that_fit_equally_well_the_lower_is_taken_and_segments_come_from_the_top():
    """A whole segment, or half of a later one, which lies lower: the later one cannot be whole again."""
    a = Allocator()
    alone = a.allocate(40 * MiB, 0)
    a.free(a.allocate(80 * MiB, 0))
    halves = [a.allocate(40 * MiB, 0) for _ in range(2)]
    a.free(alone)
    a.free(halves[1])
    a.allocate(40 * MiB, 0)
    a.free(halves[0])
    a.allocate(80 * MiB, 0)
    assert a.reserved == 200 * MiB


def test_a_compiled_step_in_fp32():
    """Measured on an H200 by `fullshard train`: 104.2 GiB. Attention is products and a softmax there, whose kernels are fused."""
    model = fs.presets.describe("llama-1.5b")
    plan = fs.ddp(model, 1, batch=fs.Batch(4, 4096), compile=True)
    units = [replace(u, remat="full") if u.name in {f"model.layers.{i}" for i in range(9)} else u for u in plan.units]
    assert predict(replace(plan, units=tuple(units)), model).allocated / 2**30 == pytest.approx(104.2, rel=0.01)
