"""Buffers that forward changes, such as BatchNorm's statistics. A recomputation must not change them again, and a step that
fails or is skipped must leave them as they were.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fullshard.on_torch.private.fsdp_groups import Owner

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # their kernels change them without telling autograd


def buffers_of(module: nn.Module) -> list[Owner]:
    return [(m, n) for m in module.modules() for n, b in m._buffers.items() if b is not None]


def _held(owners: Iterable[Owner]) -> list[tuple[Owner, Tensor]]:
    """The buffers that these owners have now."""
    return [((m, n), b) for m, n in owners if (b := m._buffers.get(n)) is not None]


class Watch:
    """Which buffers a forward changes."""

    def __init__(self, owners: Iterable[Owner]):
        self.before = [(owner, b, b._version) for owner, b in _held(owners)]
        self.seen: list[Owner] = []  # of `during`

    @contextmanager
    def during(self, context: AbstractContextManager[object]) -> Iterator[None]:
        """Inside of `context`: remember what changes."""
        with context:
            yield
        self.seen = self.changed()

    def changed(self) -> list[Owner]:
        """The buffers that were replaced or written to since, and all statistics."""
        return [p for p, b, v in self.before if p[1] in STATISTICS or p[0]._buffers.get(p[1]) is not b or b._version != v]


class ChangingBuffers:
    """The buffers of a model, by whether forward changes them. A unit shows that in the first step that uses it; until then all
    of its buffers are taken for such."""

    def __init__(self, model: nn.Module, units: Iterable[Iterable[nn.Module]]):
        self.changing: list[Owner] = []
        self.untried: dict[int, list[Owner]] = {}  # by index of the unit, -1 for what is in none
        owners: dict[int, int] = {}  # of each module, the innermost unit
        for i, modules in enumerate(units):  # the outer ones first
            owners |= {id(m): i for module in modules for m in module.modules()}
        for module, name in buffers_of(model):
            self.untried.setdefault(owners.get(id(module), -1), []).append((module, name))

    def places(self) -> list[Owner]:
        """Those that the next step may change."""
        return [*self.changing, *(place for places in self.untried.values() for place in places)]

    def ran(self, units: Iterable[int], watch: Watch) -> None:
        """A step has used these units, under `watch`."""
        changed = {(id(module), name) for module, name in watch.changed()}
        for i in units:
            self.changing += [p for p in self.untried.pop(i, []) if (id(p[0]), p[1]) in changed]


@dataclass
class BufferCopies:
    """Buffers as they were."""

    saved: list[tuple[Owner, Tensor, Tensor]] = field(default_factory=list)  # owner, buffer, its values

    @classmethod
    @torch.no_grad()
    def of(cls, owners: Iterable[Owner], device: torch.device | None = None) -> "BufferCopies":
        """`device`: where to keep the copies, by default where the buffers are."""
        return cls([(owner, b, b.detach().to(device or b.device, copy=True)) for owner, b in _held(owners)])

    @torch.no_grad()
    def restore(self) -> None:
        for (module, name), buffer, values in self.saved:
            buffer.copy_(values)
            module._buffers[name] = buffer

    @torch.no_grad()
    def restore_if(self, condition: Tensor) -> None:
        """Restore where `condition`, a flag on the device, is true. The host waits only for a buffer that was replaced by one of
        another shape."""
        alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}  # buffers as they are, and their values before
        for (module, name), buffer, values in self.saved:
            now = module._buffers[name]
            if now is None or now.shape != values.shape or now.dtype != values.dtype:
                module._buffers[name] = buffer if bool(condition) else now
            else:
                alike.setdefault(now.dtype, []).append((now, values.to(now.device)))
        for pairs in alike.values():  # a few kernels for all of them
            now, before = (torch.cat([t.reshape(-1) for t in tensors]) for tensors in zip(*pairs, strict=True))
            chosen = torch.where(condition.to(now.device), before, now).split([t.numel() for t, _ in pairs])
            torch._foreach_copy_([t for t, _ in pairs], [c.view_as(t) for (t, _), c in zip(pairs, chosen, strict=True)])


@contextmanager
def borrowed_buffers(owners: Iterable[Owner]) -> Iterator[None]:
    """Inside, the modules have copies of these buffers, and the buffers stay as they are."""
    own = _held(owners)
    for (module, name), buffer in own:
        module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for (module, name), buffer in own:
            module._buffers[name] = buffer
