"""The first failure of a run, known to every rank. A rank that only lost its connection can report the real cause."""

import re
from dataclasses import asdict, dataclass

import torch.distributed as dist

from fullshard.hang_report import call_with_timeout
from fullshard.on_torch.store_messages import StoreClient

STORE_TIMEOUT = 10.0  # seconds that the store may take to answer
CONNECTION_LOST = re.compile(
    r"closed by peer|connection (was )?reset|broken pipe|connection refused|socket|timed out waiting|"
    r"gloo|nccl (communicator|error)|remote process|failed to recv|unhandled system error",
    re.I,
)


@dataclass(frozen=True)
class Failure:
    """The error that ended a run: the rank that raised it, its sentence and its exit code."""

    rank: int
    sentence: str
    code: int


def lost_a_peer(error: BaseException) -> bool:
    """True if an error only says that the connection to another rank is lost."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(CONNECTION_LOST.search(str(error)))


def report_failure(own: Failure) -> Failure:
    """Publish this rank's failure, unless another rank failed first. Returns the run's first failure."""
    return call_with_timeout(STORE_TIMEOUT, lambda: _publish(own)) or own


def _publish(own: Failure) -> Failure:
    client = StoreClient()
    if client.claim("failures"):
        client.put("failure", asdict(own))
        return own
    return _read(client, STORE_TIMEOUT) or own


def first_failure(seconds: float) -> Failure | None:
    """The run's first failure, or None if no rank reports one within `seconds`."""
    return call_with_timeout(seconds + STORE_TIMEOUT, lambda: _read(StoreClient(), seconds))


def _read(client: StoreClient, seconds: float) -> Failure | None:
    found = client.wait(lambda: client.get("failure"), seconds)
    return Failure(**found) if found else None
