"""How a rank ends after an exception: the first real error of the run is printed once, and all ranks exit with its code."""

import os
import sys
import time
import traceback
from typing import NoReturn

from fullshard.errors import LOST, FullshardError

FIRST_SPEAKS = 1.0  # seconds: what all ranks find at once, the first one says
ALONE = 5.0  # seconds: before ranks have met, their launcher ends the others once the first has spoken
CAUSE = 15.0  # seconds in which the rank that failed first, or the launcher, should be heard of


def end_rank(error: Exception) -> NoReturn:
    """Print the error if it is the first of the run, and exit without destructors, which would wait for ranks that are gone."""
    rank = int(os.environ.get("RANK", 0))
    if not _ranks_have_met():
        time.sleep(ALONE if rank else 0.0)
        _say(error, rank)
        _leave(_code(error))
    from fullshard.on_torch.failure import Failure, first_failure, lost_a_peer, report_failure

    if lost_a_peer(error):
        found = first_failure(CAUSE)
        if found is None:  # it was killed; where a launcher watches, this process has been ended by now
            print(f"error: rank {rank} lost its connection to another rank: {_line(error)}", file=sys.stderr)
        _leave(found.code if found else LOST)
    if isinstance(error, FullshardError) and rank:
        time.sleep(FIRST_SPEAKS)
    mine = Failure(rank, _line(error), _code(error))
    first = report_failure(mine)
    if first == mine:
        _say(error, rank)
    _leave(first.code)


def _ranks_have_met() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _code(error: Exception) -> int:
    return error.exit_code if isinstance(error, FullshardError) else 1


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, FullshardError) else f"{type(error).__name__}: {text}"


def _say(error: Exception, rank: int) -> None:
    """Print one sentence; for a bug, the traceback first."""
    if not isinstance(error, FullshardError):
        traceback.print_exception(error)
    where = "" if isinstance(error, FullshardError) and not rank else f"rank {rank}: "
    print(f"error: {where}{_line(error)}", file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
