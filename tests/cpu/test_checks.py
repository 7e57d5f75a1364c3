"""Every first-step check finds its planted fault, on all ranks, and says so in one sentence."""

import pytest

from tests.cpu import faults

SENTENCES = {
    "parameter replaced": "parameter model.layers.1.mlp.up_proj.weight is not sharded: it was replaced after shard()",
    "wrong sharding": "unit head: parameter model.norm.weight lies on {'shard': 2}",
    "uninitialised": "model.layers.2.mlp.down_proj.weight was never initialised (or is NaN)",
    "buffer differs": "table differs between ranks",
    "stale optimizer": "the optimizer does not hold model.embed_tokens.weight and 29 more",
    "foreign parameters": "the optimizer holds 1 parameters the model does not train",
    "idle optimizer": "unit embed did not change in the first optimizer step",
    "tiny learning rate": "unit embed did not change in the first optimizer step",
    "equal data": "ranks 0 and 1 see the same first batch",
    "zero gradients": "unit embed received no gradient",
    "skipped on one rank": "rank 1 skipped unit model.layers.1 in forward, and went on to unit model.layers.2",
    "last skipped on one rank": "rank 1 skipped unit model.layers.2 in forward, and went on to unit head",
    "skipped by own loss": "rank 1 skipped unit model.layers.1 in forward, and went on to unit model.layers.2",
    "detached on one rank": "rank 1 skipped unit model.layers.1 in backward, and went on to unit model.layers.0",
    "mean loss": "is not the sum of the losses of its halves",
}


@pytest.mark.parametrize("fault", SENTENCES)
def test_a_planted_fault_is_found(ranks, fault):
    for found in ranks(2).run(faults.run, fault):
        assert SENTENCES[fault] in found
        assert "\n" not in found


@pytest.mark.parametrize("sound", ["nothing planted", "own sum", "zero learning rate"])
def test_a_sound_run_passes(ranks, sound):
    assert ranks(2).run(faults.run, sound) == ["trained", "trained"]


def test_the_checks_can_be_left_out(ranks):
    """To overfit one batch on purpose, say."""
    assert ranks(2).run(faults.run, "equal data", checks=False) == ["trained", "trained"]


def test_a_batch_of_one_row_cannot_be_split_and_passes(ranks):
    assert ranks(2).run(faults.run, "own sum", micro_batch=1) == ["trained", "trained"]
