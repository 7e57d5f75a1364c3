"""How a rank ends after an exception: the first real error of the run is printed once, and all ranks exit with its code."""

import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from fullshard.base.errors import LOST, AgreedError, FullshardError
from fullshard.engine.engine import load_engine
from fullshard.engine.ranks import Ranks
from fullshard.plan.engine_traits import ENGINES
from fullshard.ranks.hang_reports import call_with_timeout
from fullshard.ranks.rank_protocols import Messages

FIRST_SPEAKS = 1.0  # seconds: what all ranks find at once, the first one says
ALONE = 5.0  # seconds: before ranks have met, their launcher ends the others once the first has spoken
CAUSE = 15.0  # seconds in which the rank that failed first, or the launcher, should be heard of
STORE_TIMEOUT = 10.0  # seconds that the ranks' messages may take
SHOWN = 8  # ranks that are named
_NOBODY = "all ranks are there, so it was the network: look at the link between the machines"
OTHERS = 3.0  # seconds that the first rank, which may hold the messages, stays for ranks that find the same


@dataclass(frozen=True)
class Failure:
    """The error that ended a run: the rank that raised it, its sentence and its exit code."""

    rank: int
    sentence: str
    code: int


def end_rank(error: Exception) -> NoReturn:
    """Print the error if it is the first of the run, and exit without destructors, which would wait for ranks that are gone."""
    ranks = _met_ranks()
    if ranks is None:
        rank = int(os.environ.get("RANK", 0))
        time.sleep(ALONE if rank else 0.0)
        _say(error, rank)
        leave(_code(error))
    rank, world = ranks.rank_and_world()
    if ranks.lost_a_peer(error):
        leave(_after_loss(ranks, error))
    if isinstance(error, FullshardError) and rank:
        time.sleep(FIRST_SPEAKS)
    mine = Failure(rank, _line(error), _code(error))
    first = call_with_timeout(STORE_TIMEOUT, lambda: _publish(ranks.messages(), mine)) or mine
    if first == mine:
        _say(error, rank)
    if isinstance(error, FullshardError) and not rank:
        call_with_timeout(2 * OTHERS, lambda: ranks.messages().collect("failed", range(1, world), OTHERS))
    leave(first.code)


def _after_loss(ranks: Ranks, error: Exception) -> int:
    """The exit code of a rank that lost its connection to another one. If none reports why, one of those that are left names
    those that are gone; where a launcher watches, this process has been ended by then."""
    rank, world = ranks.rank_and_world()
    call_with_timeout(STORE_TIMEOUT, lambda: ranks.messages().put(f"left/{rank}", True))
    found = call_with_timeout(CAUSE + STORE_TIMEOUT, lambda: _read(ranks.messages(), CAUSE))
    if found is None:
        gone = call_with_timeout(STORE_TIMEOUT, lambda: _gone(ranks.messages(), world))
        if gone != "":
            why = gone or f"and nobody answers at {os.environ.get('MASTER_ADDR', 'the first machine')}: {_line(error)}"
            print(f"error: rank {rank} lost its connection to another rank: {why}", file=sys.stderr, flush=True)
    return found.code if found else LOST


def _gone(messages: Messages, world: int) -> str:
    """Which ranks are gone without a word, as a clause; empty if another rank says it."""
    if not messages.claim("told of the loss"):
        return ""
    left = messages.collect("left", range(world), 0)
    gone = [r for r in range(world) if r not in left]
    names = [f"{r} (process {pid} on {host})" for r in gone[:SHOWN] for host, pid in [messages.get(f"process/{r}") or ("?", "?")]]
    more = f" and {len(gone) - SHOWN} more are" if len(gone) > SHOWN else " are" if len(gone) > 1 else " is"
    killed = "killed, by somebody or for want of memory, or the machine failed"
    return f"rank{'s' if len(gone) > 1 else ''} {', '.join(names)}{more} gone without a word: {killed}" if gone else _NOBODY


def _met_ranks() -> Ranks | None:
    """The ranks that this one has met, on an engine of this process."""
    loaded = [load_engine(name).ranks for name in ENGINES if f"fullshard.on_{name}.engine" in sys.modules]
    return next((ranks for ranks in loaded if ranks.have_met()), None)


def _publish(messages: Messages, own: Failure) -> Failure:
    """Publish this rank's failure, unless another rank failed first. Returns the run's first failure."""
    first = own if messages.claim("failures") else _read(messages, STORE_TIMEOUT) or own
    if first == own:
        messages.put("failure", asdict(own))
    messages.put(f"failed/{own.rank}", True)
    return first


def _read(messages: Messages, seconds: float) -> Failure | None:
    """The run's first failure, or None if no rank reports one within `seconds`."""
    found = messages.wait(lambda: messages.get("failure"), seconds)
    return Failure(**found) if found else None


def _code(error: Exception) -> int:
    return error.exit_code if isinstance(error, FullshardError) else 1


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, FullshardError) else f"{type(error).__name__}: {text}"


def _say(error: Exception, rank: int) -> None:
    """Print one sentence; for a bug, the traceback first."""
    if not isinstance(error, FullshardError):
        traceback.print_exception(error)
    own = not isinstance(error, AgreedError) and (rank or not isinstance(error, FullshardError))
    where = f"rank {rank}: " if own else ""
    print(f"error: {where}{_line(error)}", file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """Exit without destructors. Threads that run only on idle cores would keep connections to other ranks open meanwhile: they
    end as fast as the others."""
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):
            os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
