"""The ranks of torch, as `fullshard.engine.ranks.Ranks`."""

from importlib.metadata import version

import torch.distributed as dist

from fullshard.on_torch.ranks.device_meshes import all_devices, data_share, finish, is_first, rank_and_world, start
from fullshard.on_torch.ranks.first_failure import lost_a_peer
from fullshard.on_torch.ranks.hang_position import main_thread_position as position
from fullshard.on_torch.ranks.launcher_timer import keep_alive
from fullshard.on_torch.ranks.rank_agreement import main_agreement as agreement
from fullshard.on_torch.ranks.store_messages import StoreClient as messages  # noqa: N813 - a call opens a connection

__all__ = [
    "agreement",
    "all_devices",
    "data_share",
    "finish",
    "have_met",
    "is_first",
    "keep_alive",
    "lost_a_peer",
    "messages",
    "position",
    "rank_and_world",
    "start",
    "versions",
]


def have_met() -> bool:
    return dist.is_initialized()


def versions() -> dict[str, str]:
    return {"torch": version("torch")}
