"""Profiles: interval unions against a grid, a GPU's trace with answers worked out by hand, memory, bad files."""

import gzip
import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from typer.testing import CliRunner

from fullshard import FullshardError
from fullshard.commands.cli import app
from fullshard.observe.profile.breakdown import LANES, break_down
from fullshard.observe.profile.intervals import intersect, length, partition, subtract, union
from fullshard.observe.profile.memory_at_peak import memory_peak
from fullshard.observe.profile.profile_files import BREAKDOWN, last_profile, profile_text
from fullshard.observe.profile.profile_summary import summarize
from fullshard.observe.profile.rank_trace import RankTrace, StepWindow, WorkSpan
from fullshard.observe.profile.recommend import recommend
from fullshard.observe.profile.torch_trace import read_torch
from fullshard.observe.profile.trace_file import read_trace

# -- intervals, against sets of whole milliseconds ------------------------------------------------------------


def drawn(draw: random.Random, count: int = 12) -> list[tuple[int, int]]:
    return [(a, a + draw.randrange(0, 9)) for a in (draw.randrange(0, 60) for _ in range(count))]


def grid(parts) -> set[int]:
    return {t for begin, end in parts for t in range(int(begin), int(end))}


@pytest.mark.parametrize("seed", range(20))
def test_intervals_equal_sets_of_milliseconds(seed):
    draw = random.Random(seed)
    first, second = drawn(draw), drawn(draw)
    a, b = union(first), union(second)
    for parts, wanted in (
        (a, grid(first)),
        (intersect(a, b), grid(first) & grid(second)),
        (subtract(a, b), grid(first) - grid(second)),
    ):
        assert grid(parts) == wanted
        assert length(parts) == len(wanted)
        assert all(x[1] <= y[0] for x, y in itertools.pairwise(parts))
    cut = partition((5, 50), {"a": a, "b": b}, "rest")
    window = set(range(5, 50))
    assert [grid(cut[k]) for k in ("a", "b", "rest")] == [
        window & grid(first),
        window & grid(second) - grid(first),
        window - grid(first) - grid(second),
    ]


def test_small_holes_are_closed():
    assert union([(0, 1), (1.4, 2), (3, 4)], holes=0.5) == [(0, 2), (3, 4)]


@pytest.mark.parametrize("seed", range(5))
def test_the_lanes_of_a_step_add_up_to_its_wall_time(seed):
    draw = random.Random(seed)
    kinds = ("compute", "gather", "reduce", "to device")
    spans = tuple(WorkSpan(a / 100, b / 100, kinds[i % 4], "k", f"u{i % 3}") for i, (a, b) in enumerate(drawn(draw, 40)))
    steps = tuple(StepWindow(i, i * 0.2, i * 0.2 + 0.17, ((i * 0.2, i * 0.2 + 0.01),)) for i in range(3))
    trace = RankTrace(0, 1, "torch", "cuda", steps, spans, ((0.03, 0.04), (0.3, 0.4)), {})
    found = break_down(trace)
    assert set(found.lanes) == set(LANES)
    assert sum(found.lanes.values()) == pytest.approx(found.step_seconds, abs=1e-12)
    assert found.step_seconds == pytest.approx(0.17)


# -- a GPU's trace, by hand -----------------------------------------------------------------------------------

MAIN = 1


def event(cat: str, name: str, begin: float, end: float, **args) -> dict:
    """A range from `begin` to `end` ms."""
    return {"ph": "X", "cat": cat, "name": name, "tid": MAIN, "ts": 5e6 + begin * 1e3, "dur": (end - begin) * 1e3, "args": args}


def memory(at: float, nbytes: int, address: int) -> dict:
    return {"ph": "i", "name": "[memory]", "ts": 5e6 + at * 1e3, "args": {"Bytes": nbytes, "Addr": address, "Device Type": 1}}


def gpu_trace(rank: int = 0, late: float = 0.0) -> dict:
    """A step of 100 ms (and `late`) on one of eight GPUs: two units, a gather under the first, a copy behind the second."""
    sizes = {"Collective name": "_allgather_base", "In msg nelems": 131072, "Out msg nelems": 1048576}
    end = 85 + late
    return {
        "distributedInfo": {"world_size": 8},
        "fullshard": {
            "rank": rank,
            "units": {"layers.0": "first", "layers.1": "second"},
            "held": {"first": {"params": 100}, "second": {"params": 200, "optimizer": 400}},
        },
        "traceEvents": [
            event("user_annotation", "fullshard.step 7", 0, end + 15),
            event("user_annotation", "fullshard.data", 0, 10),
            event("user_annotation", "FSDP::pre_forward (layers.0)", 11, 11.5),
            event("cpu_op", "aten::mm", 12, 13),
            event("cuda_runtime", "cudaLaunchKernel", 12.4, 12.6, correlation=1),
            event("kernel", "gemm_bf16", 20, 40, correlation=1, stream=7),
            event("user_annotation", "FSDP::post_forward (layers.0)", 13, 13.1),
            event("user_annotation", "FSDP::pre_forward (layers.1)", 13.2, 14),
            event("user_annotation", "FSDP::all_gather (layers.1)", 13.2, 14),
            event("cpu_op", "c10d::_allgather_base_", 13, 14),
            event("cuda_runtime", "cudaLaunchKernelExC", 13.5, 13.6, correlation=2),
            event(
                "kernel", "ncclDevKernel_AllGather_RING_LL", 30, 50, correlation=2, dtype="BFloat16", **sizes, **{"Group size": 8}
            ),
            event("cpu_op", "aten::mm", 15, 16),
            event("cuda_runtime", "cudaLaunchKernel", 15.4, 15.6, correlation=3),
            event("kernel", "gemm_bf16", 55, 75, correlation=3),
            event("cpu_op", "aten::copy_", 16, 17),
            event("cuda_runtime", "cudaMemcpyAsync", 16.2, 16.4, correlation=4),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 70, 80, correlation=4, bytes=1 << 20),
            event("user_annotation", "FSDP::post_forward (layers.1)", 18, 18.1),
            event("user_annotation", "fullshard.end forward", 18.2, 18.2),
            event("cpu_op", "aten::add", 81, end),
            event("cuda_runtime", "cudaStreamSynchronize", end, end + 15),
            memory(12.5, 1000, 1),  # first's activation, kept
            memory(13.4, 5000, 2),  # second's gathered parameters
            memory(15.5, 300, 3),  # second's activation
            memory(17.5, -5000, 2),
            memory(18.3, 50, 4),
        ],
    }


def test_a_gpus_step_worked_out_by_hand():
    found = break_down(read_torch(gpu_trace()))
    ms = {lane: round(seconds * 1e3, 6) for lane, seconds in found.lanes.items()}
    # Launch gaps: 12 to 14 and 15 to 17, and 81 to 85. The wait for the stream is none.
    assert ms == {"compute": 40, "communication": 10, "transfers": 5, "data": 10, "launch": 8, "idle": 27}
    assert found.overlap == pytest.approx(0.5)
    assert found.own_seconds == pytest.approx(0.09)
    assert found.units["first"]["forward"] == pytest.approx(0.02)
    second = found.units["second"]
    assert [second[k] for k in ("forward", "gather", "gather_exposed", "transfers", "transfers_exposed")] == pytest.approx(
        [0.02, 0.02, 0.01, 0.01, 0.005]
    )


def gloo_trace(pairs: list[tuple[str, int, tuple[float, float], tuple[float, float]]]) -> dict:
    """Collectives of a CPU: operator, elements, when the operator ran and when gloo's part did, in the form of torch's traces."""
    events = [event("user_annotation", "fullshard.step 1", 0.0, 1000.0)]
    for name, size, (begin, end), inside in pairs:
        shapes = {"Input Dims": [[size], [size]], "Input type": ["float", "float"]}
        part = {"allreduce_": "gloo:all_reduce", "_allgather_base_": "gloo:all_gather"}[name]
        events += [event("cpu_op", f"c10d::{name}", begin, end, **shapes)]
        events += [event("user_annotation", part, *inside, **{"Input Dims": [[size]], "Input type": ["float"]})] if inside else []
    return {"traceEvents": events}


def test_gloos_parts_are_those_of_their_operators_whichever_begins_first():
    """Two groups: the second one's collectives begin, and end, while the first one's wait."""
    pairs = [
        ("_allgather_base_", 4096, (1, 2), (10, 90)),
        ("allreduce_", 8, (3, 4), (5, 7)),
        ("_allgather_base_", 64, (8, 9), (9.5, 11)),
        ("allreduce_", 4096, (12, 13), (14, 40)),
    ]
    spans = [s for s in read_torch(gloo_trace(pairs)).spans if s.kind != "compute"]
    assert [(s.nbytes, round(1e3 * s.end)) for s in spans] == [(4 * n, inside[1]) for _, n, _, inside in pairs]


def lines_run(count: int) -> int:
    """Lines of Python that reading a trace takes, of so many collectives and as many parts from before the trace began, which
    wait for none of its operators."""
    early = [event("user_annotation", "gloo:all_reduce", 1 + 1e-4 * i, 2, **{"Input Dims": [[8]]}) for i in range(count)]
    document = gloo_trace([("allreduce_", 8, (10 + i, 11 + i), (10.5 + i, 12 + i)) for i in range(count)])
    lines = 0

    def trace(frame: FrameType, what: str, about: object) -> Callable:
        nonlocal lines
        lines += what == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        read_torch({"traceEvents": document["traceEvents"] + early})
    finally:
        sys.settrace(before)
    return lines


def test_gloos_parts_are_found_in_linear_time():
    assert lines_run(400) < 2.5 * lines_run(200)


def test_what_a_collective_achieved_and_the_top_kernels():
    found = summarize([read_torch(gpu_trace())])
    (gather,) = found["collectives"]
    assert (gather["kind"], gather["bytes"], gather["ranks"], gather["count"]) == ("gather", 2 << 20, 8, 1)
    assert gather["bytes_per_second"] == pytest.approx((2 << 20) * 7 / 8 / 0.02)
    assert found["kernels"] == [{"name": "gemm_bf16", "seconds": pytest.approx(0.04), "count": 2}]


def test_memory_at_the_peak_by_unit_and_kind():
    found = memory_peak(read_torch(gpu_trace()))
    assert found.nbytes == 700 + 1000 + 5000 + 300
    assert found.units == {
        "first": {"params": 100, "activations": 1000},
        "second": {"params": 200, "optimizer": 400, "gathered": 5000, "activations": 300},
    }
    assert found.phases == [("forward", 700, 2000)]


def test_the_slowest_rank_is_named_with_its_lane():
    found = summarize([read_torch(gpu_trace(0)), read_torch(gpu_trace(1, late=30)), read_torch(gpu_trace(2))])
    slow = found["slowest"]
    assert (slow["rank"], slow["lane"], slow["slow"]) == (1, "launch", True)
    assert slow["own_seconds"] - slow["others_seconds"] == pytest.approx(0.03)
    assert recommend(found, None)["change"].startswith("make rank 1 as fast as the others")
    assert not summarize([read_torch(gpu_trace(0)), read_torch(gpu_trace(1))])["slowest"]["slow"]


@pytest.mark.parametrize(("loaders", "wait", "change", "saves"), [(0, 0.4, "workers = 1", 0.4), (1, 0.6, "workers = 3", 0.6)])
def test_workers_that_hide_the_data(loaders, wait, change, saves):
    """Of a step of 1 s: loaded by the step itself, the data takes `wait`; one worker that is behind takes the whole step."""
    found = {"step_seconds": 1.0, "slowest": None, "ranks": [{"lanes": {"data": wait}}]}
    step = type("Step", (), {"loaders": loaders, "description": None, "estimate": None})()
    best = recommend(found, step)
    assert best["change"] == f"data.{change}"
    assert best["saves_seconds"] == pytest.approx(saves)


# -- JAX ------------------------------------------------------------------------------------------------------


def jax_trace() -> dict:
    """A step of 100 ms on two devices of a process: a loop around a product and a gather, then an all-reduce."""

    def work(device: int, name: str, begin: float, end: float) -> dict:
        return event("", name, begin, end, hlo_op=name, device_ordinal=str(device)) | {"tid": 10 + device}

    operations = {
        "dot.1": {"unit": "layers.0", "phase": "forward"},
        "all-gather.2": {"unit": "layers.1", "phase": "forward", "kind": "all_gather", "bytes": 4096, "ranks": 2},
    }
    parts = [("while.9", 20, 60), ("dot.1", 20, 50), ("all-gather.2", 50, 60), ("all-reduce.3", 70, 75)]
    about = {"engine": "jax", "world": 2, "devices": [0, 1], "platform": "cpu", "operations": operations}
    return {
        "fullshard": about | {"held": {"layers.0": {"params": 10}, "(all units)": {"temporaries": 90}}},
        "traceEvents": [
            event("", "fullshard.step 3", 0, 100),
            event("", "fullshard.data", 0, 5),
            event("", "PjitFunction(step)", 10, 22),
            *[work(device, *part) for device in (0, 1) for part in parts],
        ],
    }


def test_a_jax_step_worked_out_by_hand(tmp_path):
    traces = read_trace(write_trace(tmp_path, jax_trace()))
    assert [t.rank for t in traces] == [0, 1]
    found = summarize(traces)
    ms = {lane: round(seconds * 1e3, 6) for lane, seconds in found["ranks"][1]["lanes"].items()}
    assert ms == {"compute": 30, "communication": 15, "transfers": 0, "data": 5, "launch": 10, "idle": 40}
    assert {u["unit"]: (u["forward"], u["gather_exposed"]) for u in found["units"]} == {
        "layers.0": (pytest.approx(0.03), 0),
        "layers.1": (0, pytest.approx(0.01)),
    }
    assert found["memory"]["bytes"] == 100
    assert found["kernels"][0]["name"] == "dot"


# -- files ----------------------------------------------------------------------------------------------------


def write_trace(directory: Path, document: object = None) -> Path:
    path = directory / "rank-00000.trace.json.gz"
    directory.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(gpu_trace() if document is None else document).encode()))
    return path


def test_a_profile_is_shown_again_from_its_files(tmp_path):
    run = tmp_path / "run"
    write_trace(run / "profile/step-7")
    (run / "plan.json").write_text("{}")
    found = summarize(read_trace(run / "profile/step-7/rank-00000.trace.json.gz"))
    (run / "profile/step-7" / BREAKDOWN).write_text(json.dumps(found))
    shown = CliRunner().invoke(app, ["profile", str(run)])
    assert shown.exit_code == 0
    assert "step 7 on 8 cuda ranks of torch: 100.00 ms a step" in shown.stdout
    assert "the gather of unit second is the most exposed: compute waits 10.00 ms a step for it, 50% of its time" in shown.stdout
    assert CliRunner().invoke(app, ["profile", str(run), "--traces"]).stdout == shown.stdout
    assert json.loads(CliRunner().invoke(app, ["profile", str(run), "--json"]).stdout) == json.loads(json.dumps(found))


BAD = {
    "no directory": "is no directory; name a run",
    "no run": "is no run: it has no plan.json",
    "no profile": "has no profile; write profile.at = 100",
    "cut": "is damaged (Compressed file ended",
    "no gzip": "is damaged (Not a gzipped file",
    "no json": "is damaged (Expecting",
    "a list": "is no trace: it is not a JSON object",
    "no events": "it has no list of traceEvents",
    "no step": "is a trace without a step of fullshard",
    "odd events": "is damaged: ",
    "no traces": "holds no traces",
    "no breakdown": "has no breakdown.json, as a run that was killed leaves it; add --traces",
    "old breakdown": "is no breakdown of version 1",
    "half a breakdown": "breakdown.json is damaged",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(tmp_path, case):
    traces = case not in ("no breakdown", "old breakdown", "half a breakdown")
    with pytest.raises(FullshardError) as caught:
        profile_text(last_profile(plant(tmp_path / "run", case)), traces=traces)
    assert BAD[case] in str(caught.value)
    assert "\n" not in str(caught.value)


def plant(run: Path, case: str) -> Path:
    """A run with this fault."""
    if case == "no directory":
        return run
    run.mkdir()
    if case == "no run":
        return run
    (run / "plan.json").write_text("{}")
    if case == "no profile":
        return run
    documents = {"a list": [], "no events": {"traceEvents": 3}, "no step": {"traceEvents": []}}
    odd = {"traceEvents": [event("user_annotation", "fullshard.step 7", 0, 1), {"name": "[memory]", "args": {"Device Type": 0}}]}
    step = run / "profile/step-7"
    path = write_trace(step, documents.get(case, odd if case == "odd events" else None))
    whole = path.read_bytes()
    raw = {"cut": whole[: len(whole) // 2], "no gzip": b"plain text", "no json": gzip.compress(b"{{")}
    path.write_bytes(raw.get(case, whole))
    if case == "no traces":
        path.unlink()
        (step / BREAKDOWN).write_text('{"version": 1}')
    if case in ("old breakdown", "half a breakdown"):
        (step / BREAKDOWN).write_text('{"version": 0}' if case == "old breakdown" else '{"version": 1}')
    return run


def test_a_target_that_is_nothing(tmp_path):
    for arguments, words in (
        (["profile", str(tmp_path / "nothing")], "is no recipe and no run"),
        (["profile", str(tmp_path), "--steps", "2"], "is a run: its profile is shown"),
        (["profile", "r.toml", "--traces"], "--traces has no effect with a recipe"),
    ):
        assert words in str(CliRunner().invoke(app, arguments).exception)
