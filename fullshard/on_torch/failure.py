"""The first failure of a run, which every rank can ask for: a rank that only lost its peer has nothing to say itself."""

import re
from dataclasses import asdict, dataclass

import torch.distributed as dist

from fullshard.on_torch.store_messages import Board, within

PATIENCE = 10.0  # seconds that a store may take to answer
PEER = re.compile(
    r"closed by peer|connection (was )?reset|broken pipe|connection refused|socket|timed out waiting|"
    r"gloo|nccl (communicator|error)|remote process|failed to recv|unhandled system error",
    re.I,
)


@dataclass(frozen=True)
class Failure:
    """What ended a run. `code`: its exit code."""

    rank: int
    sentence: str
    code: int


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(PEER.search(str(error))))


def claim(mine: Failure) -> Failure:
    """The run's first failure: this one, unless another rank failed before."""
    return within(PATIENCE, lambda: _claim(mine)) or mine


def _claim(mine: Failure) -> Failure:
    board = Board()
    if board.first("failures"):
        board.put("failure", asdict(mine))
        return mine
    return _read(board, PATIENCE) or mine


def first_failure(seconds: float) -> Failure | None:
    """The run's first failure, if it is known within this time."""
    return within(seconds + PATIENCE, lambda: _read(Board(), seconds))


def _read(board: Board, seconds: float) -> Failure | None:
    found = board.wait(lambda: board.get("failure"), seconds)
    return Failure(**found) if found else None
