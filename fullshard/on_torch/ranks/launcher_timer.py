"""The timer of torch's elastic agent that kills a rank which no longer runs: one that is stopped cannot end by itself."""

import os
import time
from contextlib import suppress
from functools import cache

from torch.distributed.elastic.timer import FileTimerClient

FILE = "TORCHELASTIC_TIMER_FILE"  # set by an agent that was started with TORCHELASTIC_ENABLE_FILE_TIMER=1
SCOPE = "fullshard"


def keep_alive(seconds: float | None) -> None:
    """See `engine.ranks`."""
    file = os.environ.get(FILE, "")
    if not os.path.exists(file):  # the agent takes it away before it asks the ranks for their end
        return
    with suppress(OSError):
        client = _client(file)
        client.release(SCOPE) if seconds is None else client.acquire(SCOPE, time.time() + seconds)


@cache
def _client(file: str) -> FileTimerClient:
    return FileTimerClient(file)
