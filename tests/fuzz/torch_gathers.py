"""Whether torch's own gathers over gloo hold: `python -m tests.fuzz.torch_gathers --seconds 60`. Nothing of fullshard runs.

With torch 2.11 a rank dies once in some 500,000 calls of `DTensor.full_tensor`, of a heap that is corrupt. Random orders read by
it; a rank of theirs that died there is none of their findings.
"""

import argparse
import faulthandler
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

ROWS = (1, 2, 3, 8, 16)  # of a rank's shards


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.torch_gathers", description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_gather, (given.world, directory, given.seconds), given.world)  # raises what a rank died of


def _gather(rank: int, world: int, directory: str, seconds: float) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    shards = [DTensor.from_local(torch.randn(rows, 8), mesh, [Shard(0)]) for rows in ROWS]
    calls, late, end = 0, torch.zeros(()), time.monotonic() + seconds
    while not late:
        for _ in range(100):
            for shard in shards:
                shard.full_tensor()
        calls += 100 * len(shards)
        late.fill_(time.monotonic() > end)
        dist.all_reduce(late)
    if rank == 0:
        print(f"torch {torch.__version__}: {calls:,} gathers on {world} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
