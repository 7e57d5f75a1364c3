"""The benchmark's peers train what fullshard trains: the same losses from the same weights and batches."""

import pytest

from tests.cpu import peers


@pytest.fixture(scope="module")
def own(ranks) -> list[float]:
    return ranks(2).run(peers.losses, None)[0]


@pytest.mark.parametrize(
    "name", ["fully_shard", "ddp", *(pytest.param(n, marks=pytest.mark.full) for n in ("fsdp1", "accelerate"))]
)
def test_a_peer_has_the_losses_of_fullshard(ranks, own, name):
    """Of a peer each rank has the mean over its own tokens. The ranks have as many, so the mean over ranks is that of all."""
    found = [sum(losses) / 2 for losses in zip(*ranks(2).run(peers.losses, name), strict=True)]
    assert found == pytest.approx(own, rel=1e-5)
    assert own[-1] != pytest.approx(own[0], rel=1e-3)  # the weights changed
