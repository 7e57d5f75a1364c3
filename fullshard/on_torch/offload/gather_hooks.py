"""Hooks on FSDP's gathers of offloaded units: a gather waits for the unit's own update, and fetches shards from their home.

See *What a gather waits for* in `tiered_optimizer`.
"""

import torch

from fullshard.on_torch.offload.stores.offload_memory import OffloadMemory
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit
from fullshard.on_torch.offload.units.weak_hooks import weakly
from fullshard.on_torch.offload.updates.finished_updates import FinishedUpdates
from fullshard.on_torch.tensors.streams import GatherPace
from fullshard.on_torch.tensors.watched_shard import watch_values


class GatherHooks:
    """`gradients`: the dtype that a reduction after the next gathers leaves them in."""

    def __init__(self, memory: OffloadMemory, finished: FinishedUpdates, gradients: torch.dtype):
        self.memory, self.finished, self.gradients = memory, finished, gradients
        self.pace = GatherPace(memory.device)
        for unit in memory.units:
            self._hook(unit)

    def _hook(self, unit: OffloadedUnit) -> None:
        unit.group.avoid_reduction_uploads()
        if unit.shards.on_device:
            unit.group.use_shards()
            for name, p in zip(unit.names, unit.params, strict=True):
                watch_values(name, p, weakly(self._before_read, unit))
        hooks = (self._before_gather, self._at_copy, self._after_copy)
        unit.group.around_gather(*(weakly(hook, unit, needed=not unit.shards.on_device) for hook in hooks))

    def _before_gather(self, unit: OffloadedUnit) -> None:
        self.pace.wait()
        unit.group.reduce_into(self.gradients)
        ready = self.finished.events(unit)
        if not unit.shards.on_device:
            ready = [*ready, self.memory.fetcher.fetch(unit, ready)]
        for event in ready:
            if event.cuda is not None:
                unit.group.hold_gathers(event.cuda)

    def _at_copy(self, unit: OffloadedUnit) -> None:
        for event in (*self.finished.events(unit), unit.fetched):
            event.hold_current()

    def _after_copy(self, unit: OffloadedUnit) -> None:
        if not unit.shards.on_device:
            self.memory.fetcher.release(unit)

    def _before_read(self, unit: OffloadedUnit) -> None:
        """Before the unit's shards are read from outside."""
        for event in self.finished.events(unit):
            event.hold_current()
