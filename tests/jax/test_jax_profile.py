"""A profile of a JAX state: each device is a rank, its operations have units, its collectives the bytes of the program."""

import jax
import numpy as np
import pytest

import fullshard as fs
from fullshard import on_jax
from fullshard.observe.profile.breakdown import break_down
from fullshard.observe.profile.profile_summary import summarize
from fullshard.observe.profile.trace_file import read_traces, trace_files
from fullshard.on_jax.engine.machine import profiler as start_profiler


def test_the_devices_of_a_process_are_ranks_of_its_profile(tmp_path):
    model = on_jax.load_model("llama-nano")
    plan = fs.zero3(on_jax.describe(model), devices=2, batch=fs.Batch(2, 16))
    state = on_jax.shard(model, plan, optimizer=fs.AdamW(lr=1e-3), seed=0)
    ids = np.random.default_rng(0).integers(0, 64, (4, 17))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    on_jax.train_step(state, [batch]).numbers()
    profiler = start_profiler(state)
    for step in (2, 3):
        profiler.begin(step)
        profiler.data_here()
        on_jax.train_step(state, [batch]).numbers()
        profiler.end()
    profiler.write(tmp_path)
    assert state.step == 3
    assert not any(type(step).__name__ == "_Recorded" for step in state.compiled.values())
    traces = read_traces(trace_files(tmp_path))
    assert [t.rank for t in traces] == [0, 1]
    for trace in traces:
        found = break_down(trace)
        assert sum(found.lanes.values()) == pytest.approx(found.step_seconds, abs=1e-9)
        assert {"embed", "head", "model.layers.0", "model.layers.1"} <= found.units.keys()
        assert all(found.units[f"model.layers.{i}"][phase] > 0 for i in (0, 1) for phase in ("forward", "backward"))
    summary = summarize(traces)
    weight = 4 * int(np.prod(state.params["model.embed_tokens.weight"].shape))
    assert any(c["kind"] == "gather" and c["bytes"] == weight and c["ranks"] == 2 for c in summary["collectives"])
    params = sum(row.get("params", 0) for row in summary["memory"]["units"].values())
    assert params == sum(int(x.addressable_shards[0].data.nbytes) for x in jax.tree.leaves(state.params))
