"""Buffers that forward changes, such as BatchNorm's statistics. A recomputation must not change them again, and a step that
fails or is skipped must leave them as they were.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]  # a buffer's module, and its name there
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def statistics(model: nn.Module) -> list[Place]:
    """The running statistics of normalisation layers. Their kernels change them without telling autograd."""
    return [(m, n) for m in model.modules() for n in STATISTICS if isinstance(m._buffers.get(n), Tensor)]


class Watch:
    """Which buffers a forward changes."""

    def __init__(self, model: nn.Module):
        known = {(id(m), n) for m, n in statistics(model)}
        others = [(m, n) for m in model.modules() for n in m._buffers if (id(m), n) not in known]
        self.before = [(place, b, b._version) for place in others if (b := place[0]._buffers[place[1]]) is not None]
        self.seen: list[Place] = []  # of `during`

    @contextmanager
    def during(self, context: AbstractContextManager[object]) -> Iterator[None]:
        """Inside of `context`: remember what changes."""
        with context:
            yield
        self.seen = self.changed()

    def changed(self) -> list[Place]:
        """Beside the known statistics: those that were replaced or written to since."""
        return [place for place, b, version in self.before if place[0]._buffers.get(place[1]) is not b or b._version != version]


@dataclass
class BufferCopies:
    """Buffers as they were."""

    saved: list[tuple[Place, Tensor, Tensor]] = field(default_factory=list)  # place, buffer, its values

    @classmethod
    @torch.no_grad()
    def of(cls, places: Iterable[Place], device: torch.device | None = None) -> "BufferCopies":
        """`device`: where to keep the copies, by default where the buffers are."""
        there = [(place, b) for place in places if (b := place[0]._buffers.get(place[1])) is not None]
        return cls([(place, b, b.detach().to(device or b.device, copy=True)) for place, b in there])

    def only(self, places: Iterable[Place]) -> "BufferCopies":
        wanted = {(id(module), name) for module, name in places}
        return BufferCopies([s for s in self.saved if (id(s[0][0]), s[0][1]) in wanted])

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
def borrowed_buffers(places: Iterable[Place]) -> Iterator[None]:
    """Inside, the modules have copies of these buffers, and the buffers stay as they are."""
    own = [(m, n, b) for m, n in places if (b := m._buffers.get(n)) is not None]
    for module, name, buffer in own:
        module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in own:
            module._buffers[name] = buffer
