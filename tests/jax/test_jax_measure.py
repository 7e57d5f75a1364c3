"""`fullshard measure --engine jax`: a cluster file that the planner takes."""

import json

import pytest
from typer.testing import CliRunner

import fullshard as fs
from fullshard.commands.cli import app
from fullshard.on_jax.measuring import measure as timing
from fullshard.on_jax.measuring.measure import measure


def test_a_measured_machine_is_a_cluster_that_plans(tmp_path):
    where = tmp_path / "cluster.json"
    done = CliRunner().invoke(app, ["measure", "--engine", "jax", "--quick", "-o", str(where), "--disk", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = fs.Cluster.load(str(where))
    assert found.name == "8xcpu"
    for quantity in ("memory", "hbm", "launch", "dram", "host_memory"):
        assert found.source_of(quantity) == "measured", quantity
    assert found.source_of("gemm", "fp32") == found.source_of("attention", "fp32") == "measured"
    assert {c.kind: c.ranks for c in found.measured.collectives} == {"all_gather": 8, "reduce_scatter": 8, "all_reduce": 8}
    for quantity in ("adamw", "pointwise", "pcie_up"):
        assert found.source_of(quantity) == "nominal", quantity
    assert any("CPU AdamW" in note and "nominal" in note for note in found.measured.notes)
    assert "by JAX" in done.output
    plan, estimate = fs.find_plan(fs.presets.describe("llama-nano"), found, sequence=16, global_batch=16)
    assert plan.mesh.devices == 8
    assert estimate.tokens_per_second > 0


def test_a_rate_is_work_over_time(monkeypatch):
    """By a clock that gives every call a hundredth of a second."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(timing, "perf_counter", lambda: next(ticks) / 100)
    assert timing._copy_rate(4000, 0.05) == pytest.approx(2 * 4000 / 0.01)
    assert timing._dispatch() == pytest.approx(0.01 / timing.CALLS)
    (gemm,) = (g for g in timing._gemms(timing.jax.devices()[0], 0.0)["gemms"] if g.m == 1024)
    assert gemm.rate == pytest.approx(2 * 1024**3 / 0.01)


def test_a_part_that_fails_is_a_note(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no such kernel\nmore")

    for part in ("_gemms", "_attention", "_collectives", "measured_disk"):
        monkeypatch.setattr(timing, part, fails)
    found = measure(tmp_path, quick=True)
    assert "matrix products was left out: no such kernel" in found.measured.notes
    assert found.source_of("gemm", "fp32") == "nominal"
    json.loads(found.to_json())


def test_bad_input_is_a_sentence(tmp_path):
    with pytest.raises(fs.FullshardError, match="is not a directory; write the directory whose disk"):
        measure(tmp_path / "none")
