"""The memory that lanes work in: slots and a bench of the device, trays of the host. Taken once, at the start; but for trays
in the master's dtype, which only steps of the caller's own need.
"""

from functools import partial

import torch

from fullshard.on_torch.offload.stores.resting import Resting
from fullshard.on_torch.offload.updates.buffers import Bench, Gradients, Slot, Tray
from fullshard.storage.host import Arena, room
from fullshard.update_pieces import TRAYS


def make_staging(resting: Resting, ring: int) -> tuple[list[Slot], Bench]:
    """Memory of the device for pieces that are streamed past it, `ring` at a time; none where no piece is."""
    master = resting.master
    streamed = [p for a in resting.units for p in a.pieces if p.lane == "gpu"]
    first = master if any(p.paired or not p.packed for p in streamed) else torch.int16
    apart = any(p.packed or p.away.unit.home.params != "device" for p in streamed if not p.paired)
    memory = partial(torch.zeros, resting.largest, device=resting.device)
    slots = [Slot([memory(dtype=t) for t in (first, *[master] * resting.rule.slots)]) for _ in range(ring)]
    gradient = memory(dtype=master) if ring else torch.empty(0)
    wide = memory(dtype=master) if any(p.packed for p in streamed) else None
    return slots, Bench(Gradients(gradient), wide, memory(dtype=resting.compute) if apart else None)


def make_trays(resting: Resting, dtype: torch.dtype) -> list[Tray]:
    """Memory of the host for pieces that the cores update. `dtype`: of their gradients."""

    def pinned(kind: torch.dtype) -> torch.Tensor:
        return resting.arena.take(resting.largest * kind.itemsize).view(kind)

    count = min(TRAYS, sum(p.lane == "cpu" for a in resting.units for p in a.pieces))
    return [Tray(Gradients(pinned(dtype)), pinned(resting.compute) if resting.sends else None) for _ in range(count)]


def widen_trays(trays: list[Tray], resting: Resting) -> None:
    """Room for gradients in the master's dtype: the caller's own may be sums, or scaled, and are updated with as they are."""
    missing = [tray for tray in trays if tray.wide is None]
    if not missing:
        return
    nbytes = resting.largest * resting.master.itemsize
    arena = Arena(room([nbytes] * len(missing)), resting.device.type == "cuda", "gradients of the caller's own steps")
    for tray in missing:
        tray.wide, tray.arena = Gradients(arena.take(nbytes).view(resting.master)), arena
