"""`shard(…, broadcast=True)`: rank 0's values for ranks that were seeded differently, held against its unsharded model."""

import pytest
import torch

from tests.cpu import seeded_apart


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.full)])
def test_ranks_of_other_seeds_train_the_first_ranks_model(ranks, strategy):
    found = ranks(2).run(seeded_apart.trained, True, strategy)
    plain = found[0]["plain"]
    for rank in found:
        assert rank["losses"] == pytest.approx(plain["losses"], abs=1e-6)
        for name, wanted in plain["weights"].items():
            assert float((rank["weights"][name] - wanted).abs().max()) < 1e-6, name
        assert all(torch.equal(rank["buffers"][n], b) for n, b in plain["buffers"].items())
    assert found[0]["drawn"] != found[1]["drawn"]  # each rank keeps its own random stream


def test_without_it_the_refusal_names_it(ranks):
    for found in ranks(2).run(seeded_apart.trained, False):
        assert "has different values on different ranks" in found["said"]
        assert "write shard(..., broadcast=True)" in found["said"]


def test_what_cannot_be_broadcast_is_refused(ranks):
    for found in ranks(2).run(seeded_apart.refusals):
        assert "broadcast has no effect: this model is on meta" in found["meta"]
        assert "shift is [5] in float32 on rank 1, but [6] in float32 on rank 0" in found["other"]
