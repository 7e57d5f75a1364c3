"""Whether the disk of a run has room for what its plan puts there, before there are ranks."""

import shutil

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text
from fullshard.model.description import Description
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan
from fullshard.planner.step.offload_bytes import OffloadBytes, slots_of
from fullshard.planner.step.unit_sizes import unit_sizes
from fullshard.ranks.local_ranks import ranks_here


def free_disk(directory: str, ranks: int) -> int:
    """Bytes that a rank may take of what is free on the disk of a directory; all ranks of this machine share it."""
    try:
        return shutil.disk_usage(directory).free // ranks_here(ranks)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise FullshardError(f"disk.path = {directory!r} cannot be used: {why}; write a directory that exists") from None


def filed_bytes(plan: Plan, description: Description, optimizer: Optimizer) -> int:
    """Bytes of a rank's parameters and optimizer state on disk."""
    return sum(OffloadBytes(plan, unit_sizes(plan, description), slots_of(optimizer)).disk().values())


def refuse_full_disk(directory: str, nbytes: int, ranks: int) -> None:
    """Say so if files of `nbytes` for each rank have no room."""
    here, free = ranks_here(ranks), free_disk(directory, ranks)
    if nbytes > free:
        each = f" for each of {here} ranks" if here > 1 else ""
        raise FullshardError(
            f"the plan puts {bytes_text(nbytes)} on disk{each}, but {directory} has {bytes_text(free * here)} free; "
            "make room, use another disk, or keep more on the device or the host"
        )
