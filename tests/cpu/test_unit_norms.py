"""Gradient norms by unit equal those of the unsharded model, in every layout and home, at no further collective."""

import pytest

from fullshard.plan.plan import Home
from tests.cpu import unit_norms

full = pytest.mark.full
HOST = Home(optimizer="host")


@pytest.mark.parametrize(
    ("world", "strategy", "options"),
    [
        (2, "zero3", {}),
        (2, "zero3", {"home": HOST, "clip": None}),
        pytest.param(4, "hybrid", {"arguments": {"replicate": 2, "shard": 2}, "accumulate": 2}, marks=full),
        pytest.param(2, "ddp", {}, marks=full),
        pytest.param(2, "zero1", {"accumulate": 2}, marks=full),
        pytest.param(2, "zero3", {"home": HOST, "accumulate": 2}, marks=full),
        pytest.param(2, "zero3", {"kind": "lora"}, marks=full),
        pytest.param(2, "zero3", {"compute": "fp16"}, marks=full),
        pytest.param(4, "zero3", {"arguments": {"tensor": 2}}, marks=full),
    ],
    ids=str,
)
def test_norms_are_those_of_the_unsharded_model(ranks, world, strategy, options):
    case = {"kind": "plain", "home": Home(), "compute": "fp32", "accumulate": 1, "clip": 0.5, "arguments": {}} | options
    results = ranks(world).run(unit_norms.sharded, strategy, **case)
    close = 1e-5 if case["compute"] == "fp32" else 2e-2
    wanted, *_ = ranks(world).run(unit_norms.by_hand, case["kind"])
    for found, counts in results:
        (first, _), *_ = found
        assert {unit.removeprefix("base_model.model."): norm for unit, norm in first.items()} == pytest.approx(wanted, rel=close)
        for norms, whole in found[:2]:
            assert sum(n**2 for n in norms.values()) ** 0.5 == pytest.approx(whole, rel=1e-6)
        assert found[2][0] == {}  # not asked for
        assert counts[1] == counts[2]
