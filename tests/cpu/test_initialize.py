"""Weights from nothing: the same at every world size, never whole on one rank, never forgotten."""

import os

import pytest

from tests.cpu import initial

LAYOUTS = {
    1: [("zero3", {"devices": 1})],
    2: [("ddp", {"devices": 2}), ("zero3", {"devices": 2}), ("zero3", {"devices": 2, "tensor": 2})],
    4: [
        ("hybrid", {"replicate": 2, "shard": 2}),
        ("mixed", {"devices": 4, "replicate": ["embed"]}),
        ("zero3", {"devices": 4, "tensor": 2}),
    ],
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["plain", "tied", "llama", "gemma3"])
def test_the_same_weights_at_every_world_size_and_strategy(ranks, name):
    want = ranks(1).run(initial.unsharded_digest, name)[0]
    for world, layouts in LAYOUTS.items():
        for strategy, arguments in layouts:
            for found in ranks(world).run(initial.digest, name, strategy, arguments):
                assert found == want, (world, strategy, [n for n in want if found[n] != want[n]])


def test_the_same_weights_under_every_grouping(ranks):
    want = ranks(2).run(initial.unsharded_digest, "plain")[0]
    for grouping in (
        {"min_params": 2000},
        {"classes": ["LlamaAttention", "LlamaFeedForward"]},
        {"names": ["model.layers.*", "lm_head"]},
    ):
        assert ranks(2).run(initial.digest, "plain", "zero3", {"devices": 2}, grouping)[0] == want


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["lora", "mixtral", "gpt2"])
def test_the_same_weights_where_the_tensor_axis_does_not_reach(ranks, name):
    want = ranks(2).run(initial.unsharded_digest, name)[0]
    for strategy in ("ddp", "zero3"):
        assert ranks(2).run(initial.digest, name, strategy, {"devices": 2})[0] == want


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="resetting the peak of resident memory needs Linux")
def test_no_rank_ever_holds_the_whole_model(ranks):
    for rose, shards, unit, model in ranks(4).run(initial.peak_while_sharding):
        assert rose <= shards + 2 * unit + 24 * 2**20, (rose, shards, unit)  # the rest: allocator, gloo, code
        assert rose < model / 2


def test_initial_values_follow_the_models_rules(ranks):
    found = ranks(2).run(initial.statistics)[0]
    assert found["std"] == pytest.approx(0.02, rel=0.1)
    assert found["norm"] == 1.0
    assert found["lora_B"] == 0.0
    assert found["lora_A"] > 0.01


@pytest.mark.parametrize("kind", ["float", "bool", "parameter"])
def test_what_nobody_initialises_is_an_error(ranks, kind):
    for found in ranks(2).run(initial.forgotten, kind):
        assert found.startswith("table was never initialised"), found
        assert "reset_parameters() that sets it" in found


def test_init_function_of_a_module(ranks):
    assert ranks(2).run(initial.forgotten, "bool", init=True) == ["no error"] * 2
