import pytest

from tests.cpu.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """`ranks(2)`: two live ranks, shared by all tests of the session."""
    pools: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        return pools.setdefault(world, Ranks(world))

    yield get
    for pool in pools.values():
        pool.stop()
