"""How ranks of one start find each other in the launcher's store, which may still hold what an earlier start wrote."""

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from fullshard.on_torch.ranks.rendezvous import agree_on_start
from fullshard.on_torch.ranks.store_messages import StoreClient

WORLD = 6


def test_every_start_has_its_own_name():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    StoreClient(server).put("join/3", "a process that died before the others came")

    def join(rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        return agree_on_start(store, rank, WORLD)

    with ThreadPoolExecutor(WORLD) as pool:
        starts = [set(pool.map(join, range(WORLD))) for _ in range(3)]
    assert [len(names) for names in starts] == [1, 1, 1]
    assert len(set.union(*starts)) == 3


def test_a_rank_is_told_only_about_itself():
    """What is in the store for one rank does not grow with their number."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    join = lambda rank: agree_on_start(server.clone(), rank, WORLD)
    with ThreadPoolExecutor(WORLD) as pool:
        (start,) = set(pool.map(join, range(WORLD)))
    told = [StoreClient(server).get(f"counted/{rank}") for rank in range(WORLD)]
    assert [name for _, name in told] == [start] * WORLD
    assert len({who for who, _ in told}) == WORLD
