"""The host memory that a save's copies may take: where one rank has too little, all write from the state itself."""

from fullshard.base.text import bytes_text
from fullshard.ranks.agreement import RankAgreement
from fullshard.ranks.local_ranks import ranks_here
from fullshard.storage.memory_limits import host_limit


def refused_copies(ranks: RankAgreement, nbytes: int, held: int, given: int | None) -> str:
    """Why the ranks make no copies, the same sentence on all; empty if each has room for its own. Collective.

    `nbytes`: of this rank's copies. `held`: bytes that it has for copies already. `given`: what they may take; by default its
    share of what is free, of which a sixteenth stays free.
    """

    def sizes() -> list[int]:
        room = host_limit() * 15 // 16 // ranks_here() + held if given is None else given
        return [nbytes, room]

    short = [(needed, room) for needed, room in ranks.gather_integers(sizes, 2) if needed > room]
    return _no_room(*short[0]) if short else ""


def _no_room(needed: int, room: int) -> str:
    return (
        f"a copy of {bytes_text(needed)} does not fit into the {bytes_text(max(0, room))} of host memory that it may take: "
        "training waits while a checkpoint is written"
    )
