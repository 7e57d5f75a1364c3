"""Sharded equals unsharded: loss, gradient norm and every parameter after AdamW steps: four, and ten in the whole matrix."""

import itertools
import random
from dataclasses import replace

import pytest

from tests.cpu import parity
from tests.cpu.parity import Case

STRATEGIES = {
    2: [
        ("ddp", {}),
        ("zero1", {}),
        ("zero2", {}),
        ("zero3", {}),
        ("hybrid", {"replicate": 2, "shard": 1}),
        ("mixed", {"replicate": ["embed", "*.1"]}),
        ("mixed", {"replicate_below": 2000}),
    ],
    4: [
        ("ddp", {}),
        ("zero1", {}),
        ("zero2", {}),
        ("zero3", {}),
        ("hybrid", {"replicate": 2, "shard": 2}),
        ("hpz", {"reshard": 2}),
        ("mixed", {"replicate": ["embed", "*.1"]}),
        ("mixed", {"replicate_below": 2000}),
    ],
}
FACTORS = (("fp32", "bf16"), ("none", "full", "selective"), (1, 4), ("plain", "tied", "lora"))
MATRIX = [
    (world, Case(strategy, arguments, compute, remat, accumulate, kind=kind))
    for world in STRATEGIES
    for (strategy, arguments), compute, remat, accumulate, kind in itertools.product(STRATEGIES[world], *FACTORS)
]


def sample(matrix: list, each: int) -> list:
    """For each strategy and world `each` cases, drawn so that neighbours differ in every factor."""
    draw = random.Random(277)  # with which one of each meets every value in both worlds, and few of the dearest cases
    chosen = []
    for world in STRATEGIES:
        for strategy, arguments in STRATEGIES[world]:
            mine = [c for c in matrix if c[0] == world and (c[1].strategy, c[1].arguments) == (strategy, arguments)]
            chosen += draw.sample(mine, each)
    return chosen


SAMPLED = sample(MATRIX, 1)


def check(ranks, world: int, case: Case) -> None:
    if case.compute == "fp32":
        for found in ranks(world).run(parity.errors, case):
            assert found["loss"] <= 1e-6, found
            assert found["norm"] <= 1e-6, found
            assert found["param"] <= 1e-6, found
    else:
        for found in ranks(world).run(parity.bf16_errors, case):
            assert found["loss"] <= found["stock_loss"] + 1e-6, found
            assert found["excess"] <= 1e-6, found
            assert found["stock_worst"] < 0.2, found  # the comparison means something


def test_the_sample_covers_every_value_of_every_factor():
    for i, values in enumerate(FACTORS):
        for value in values:
            hits = [world for world, c in SAMPLED if (c.compute, c.remat, c.accumulate, c.kind)[i] == value]
            assert len(hits) >= 4, value
            assert {*hits} == {*STRATEGIES}, value


@pytest.mark.quick(4)
@pytest.mark.parametrize(("world", "case"), SAMPLED, ids=[f"{w}-{c}" for w, c in SAMPLED])
def test_sampled(ranks, world, case):
    check(ranks, world, case)


@pytest.mark.full
@pytest.mark.parametrize(("world", "case"), MATRIX, ids=[f"{w}-{c}" for w, c in MATRIX])
def test_whole_matrix(ranks, world, case):
    check(ranks, world, replace(case, steps=10))


VARIATIONS = [
    (2, Case("zero3", accumulate=4, sync="last", clip=0.1)),
    (2, Case("ddp", accumulate=4, sync="last", clip=0.1)),
    (4, Case("hybrid", {"replicate": 2, "shard": 2}, accumulate=2, sync="last", kind="lora", clip=0.01)),
    (2, Case("zero3", prefetch=3, remat="full")),
    (2, Case("zero3", {"tensor": 2}, clip=0.1)),
    (4, Case("zero3", {"tensor": 2}, kind="tied", remat="full", accumulate=2, clip=0.1)),
    (4, Case("hybrid", {"tensor": 2, "replicate": 2, "shard": 1})),
    (4, Case("ddp", {"tensor": 2}, accumulate=2)),
    (4, Case("zero1", {"tensor": 2}, accumulate=2, remat="selective")),
    (4, Case("mixed", {"tensor": 2, "replicate": ["embed", "*.1"]}, clip=0.1)),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("world", "case"), VARIATIONS, ids=[f"{w}-{c}" for w, c in VARIATIONS])
def test_deferred_sync_clipping_prefetch_and_the_tensor_axis(ranks, world, case):
    check(ranks, world, case)
