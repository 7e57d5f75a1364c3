"""Costs as values: polynomials, JSON, and the kernels' own allocations as they were measured."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.base.errors import FullshardError
from fullshard.model import kernel_workspaces
from fullshard.model.costs import Calls, Costs, Event, Op, Section, Trace, constant, evaluate, fit, from_json, to_json

GRID = [(b, t) for b in (1, 3) for t in (5, 8, 20)]
whole = st.integers(-(10**12), 10**12)


@given(st.tuples(whole, whole, whole, whole, whole, whole))
def test_six_points_give_the_polynomial_back(p):
    assert fit({point: evaluate(p, *point) for point in GRID}) == p


def test_a_fit_without_integer_coefficients_is_none():
    assert fit({(b, t): b * t // 7 for b, t in GRID}) is None


def test_traces_survive_json():
    events = (
        Event("allocate", "1", "", ((0, 0, 0, 0, 8192, 0),)),
        Event("allocate", "2", "", (constant(3), constant(4)), "sum_rows"),
        Event("free", "out0", "<"),
        Event("ready", "grad:w"),
        Event("free", "1"),
    )
    product = Op("gemm", constant(9), constant(4), (constant(1), constant(2), constant(3)))
    section = Section(events, (product,), Calls(2, 76, 154))
    traces = {("bf16", "plain", "none"): Trace((("start", ""), ("forward", "a")), (Section(), section), (0, 1))}
    back = from_json(json.loads(json.dumps(to_json(traces))))
    assert {k: list(t) for k, t in back.items()} == {k: list(t) for k, t in traces.items()}


def test_sections_without_calls_have_none():
    old = {"sizes": [], "sections": [[[], []]], "traces": {"bf16/plain/full": {"moments": [["start", ""]], "template": [0]}}}
    assert from_json(old)["bf16", "plain", "full"].sections[0].calls == Calls(0, 0, 0)


def test_what_was_not_traced_is_said():
    with pytest.raises(FullshardError, match="not traced for fp32/plain/none"):
        Costs({("bf16", "plain", "none"): Trace((), (), ())}).trace("fp32", "plain", "none")
    with pytest.raises(FullshardError, match="micro_batch=2"):
        Costs(shape=(1, 8)).check(2, 8)


# Bytes as an H200 allocated them with torch 2.11 (benchmarks/memory_probe.py).
@pytest.mark.parametrize(
    ("rule", "arguments", "measured"),
    [
        ("attention_backward", (1, 32, 8, 4096, 4096, 128, 2), [134_742_272]),
        ("attention_backward", (3, 16, 4, 1000, 1000, 128, 2), [49_344_256]),
        ("attention_backward", (4, 25, 25, 1024, 1024, 64, 2), [26_624_256]),
        ("attention_backward", (2, 24, 8, 4096, 4096, 96, 2), [151_781_632]),
        ("embedding_backward", (1000, 32_000, 768), []),
        ("embedding_backward", (3073, 32_000, 768), [24_584] * 5 + [27_040, 10_383_360]),
        ("embedding_backward", (65_536, 32_000, 768), [524_288] * 3 + [256_000] * 2 + [308_424, 118_434_816]),
        ("sum_rows", (4096, 2048), [67_108_864, 64]),
        ("chunk_cat", (9, *[65_536 * 4] * 9), [9664]),
        ("chunk_cat", (9, *[65_536 * 2] * 9), [5056]),
    ],
)
def test_kernels_allocate_what_was_measured(rule, arguments, measured):
    assert list(kernel_workspaces.WORKSPACES[rule](*arguments)) == measured
