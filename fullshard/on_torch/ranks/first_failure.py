"""Errors of torch that only say that another rank is gone."""

import re

import torch.distributed as dist

CONNECTION_LOST = re.compile(
    r"closed by peer|connection (was )?reset|broken pipe|connection refused|socket|timed out waiting|"
    r"gloo|nccl (communicator|error)|remote process|failed to recv|unhandled system error",
    re.I,
)


def lost_a_peer(error: BaseException) -> bool:
    """True if an error only says that the connection to another rank is lost."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(CONNECTION_LOST.search(str(error)))
