"""The GPU's lane: pieces whose state is streamed past it."""

import threading
from collections.abc import Callable
from functools import cache
from subprocess import SubprocessError
from types import ModuleType

import torch
from torch import Tensor

from fullshard.errors import FullshardError, first_line
from fullshard.on_torch.offload.events import DONE, Moment, Stream
from fullshard.on_torch.offload.kernels.adam import Rule, apply_rule
from fullshard.on_torch.offload.stores.packing import pack, unpack
from fullshard.on_torch.offload.units import Piece
from fullshard.on_torch.offload.updates.buffers import Bench, Slot, segment_views
from fullshard.on_torch.offload.updates.copy_queue import Bus
from fullshard.on_torch.offload.updates.lane import Emit, Store, unheard
from fullshard.on_torch.offload.updates.threads import Crew
from fullshard.on_torch.offload.updates.unit_update import Job


class Streamed:
    """State up, update, state down. On a CPU the same by copies.

    State goes back by a thread of its own: with many slots, the next updates do not wait for the bus, and a forward that
    waits for them goes on.
    """

    def __init__(self, device: torch.device, rule: Rule, store: Store, slots: list[Slot], bench: Bench, emit: Emit, bus: Bus):
        self.rule, self.store, self.slots, self.bench, self.emit, self.bus = rule, store, slots, bench, emit, bus
        self.work = Stream(device, first=True)
        self.turn = 0
        self.back = Crew("back", 1 if slots else 0)
        self.returned: dict[int, threading.Event] = {}  # by piece: its state is queued to go back
        self.one_kernel = one_kernel(device, rule) if slots else None
        self.failed: Callable[[BaseException], None] = unheard

    def stage(self, job: Job, piece: Piece) -> tuple[Slot, list[Tensor]]:
        slot = self.slots[self.turn % len(self.slots)]
        self.turn += 1
        if piece.number in self.returned:
            self.returned[piece.number].wait()
        slot.idle.wait()
        slot.idle.clear()
        resting, there = self.store.open(piece)
        slot.filled = self.bus.up.send(slot.of(piece), resting, slot.free, there)
        self.bus.moved_up += sum(t.nbytes for t in resting)
        return slot, resting

    def apply(self, job: Job, piece: Piece, staged: tuple[Slot, list[Tensor]]) -> Moment:
        slot, resting = staged
        _, skip = job.go.wait()
        if skip:
            self.store.close(piece, None)
            slot.idle.set()
            return DONE
        with self.work:
            self.work.after(slot.filled, job.ready, job.go.moment)
            update = self._at_once if piece.packed and self.one_kernel is not None else self._by_torch
            new = update(job, piece, slot)
            updated = self.work.moment()
        self.returned[piece.number] = threading.Event()
        self.back.share(self._return, [(piece, slot, resting, updated)], lambda _: None)
        return new

    def _return(self, piece: Piece, slot: Slot, resting: list[Tensor], updated: Moment) -> None:
        try:
            state = resting[: 1 + self.rule.slots]  # the parameters of a pair have gone ahead
            slot.free = self.bus.down.send(state, slot.of(piece)[: len(state)], updated)
            self.bus.moved_down += sum(t.nbytes for t in state)
            self.store.close(piece, slot.free)
        except BaseException as error:
            self.failed(error)
        slot.idle.set()
        self.returned[piece.number].set()

    def release(self) -> None:
        """The lane is broken: nobody may wait for what does not come."""
        for event in (*(slot.idle for slot in self.slots), *self.returned.values()):
            event.set()

    def settle(self) -> None:
        """All state is queued to go back."""
        for event in list(self.returned.values()):
            event.wait()

    def _at_once(self, job: Job, piece: Piece, slot: Slot) -> Moment:
        """The update of a packed piece, each of its segments in one pass."""
        assert self.one_kernel is not None
        for s, (parameters, state) in zip(piece.segments, self._words(piece, slot), strict=True):
            gradient = job.gradients[s.parameter]
            if gradient is not None:
                step, group = job.steps[s.parameter], job.groups[s.parameter]
                part = gradient.reshape(-1) if s.whole else gradient.reshape(-1)[s.start : s.stop]
                self.one_kernel.update_packed(self.rule, part, parameters, state, job.go.scale, step, group)
        job.read()
        return self._out(piece, slot.of(piece)[3]) if piece.paired else self.work.moment()

    def _words(self, piece: Piece, slot: Slot) -> list[tuple[Tensor, list[Tensor]]]:
        """By segment, its parameters and state for the kernel."""
        if piece.number not in slot.words:
            assert self.one_kernel is not None
            staged = slot.of(piece)
            parameters = segment_views(staged[3], piece, flat=True) if piece.paired else self.store.shards_of(piece)
            states = zip(*(segment_views(t, piece, flat=True) for t in staged[:3]), strict=True)
            slot.words[piece.number] = [self.one_kernel.words(*both) for both in zip(parameters, states, strict=True)]
        return slot.words[piece.number]

    def _by_torch(self, job: Job, piece: Piece, slot: Slot) -> Moment:
        """The update by torch's kernels, on the bench."""
        staged, gradient = slot.of(piece), self._gradient(job, piece)
        master, *moments = self._wide(piece, staged)
        for start, stop, index in job.runs(piece):
            part = [t[start:stop] for t in (master, gradient, *moments)]
            apply_rule(self.rule, part[0], part[1], part[2:], job.steps[index], job.groups[index])
        rounded = self._rounded(piece, staged)
        new = self._out(piece, master if rounded is None else rounded.copy_(master))
        if piece.packed:
            assert rounded is not None
            low, _, second = staged[:3]
            pack(master, rounded, low, second)
        return new

    def _gradient(self, job: Job, piece: Piece) -> Tensor:
        job.collect(piece, self.bench.gradients.of(piece))
        job.read()
        gradient = self.bench.gradients.memory[: piece.elements]
        for factor in job.go.scale if job.go.scale is not None else ():
            gradient.mul_(factor.to(gradient.dtype))
        return gradient

    def _wide(self, piece: Piece, staged: list[Tensor]) -> list[Tensor]:
        """Master and moments, as the rule takes them."""
        if not piece.packed:
            return staged
        low, first, second = staged[:3]
        rounded = self._rounded(piece, staged)
        assert self.bench.master is not None
        assert rounded is not None
        master = self.bench.master[: piece.elements]
        if not piece.paired:
            torch._foreach_copy_(segment_views(rounded, piece, flat=True), self.store.shards_of(piece))
        unpack(rounded, low, second, master)
        return [master, first, second]

    def _rounded(self, piece: Piece, staged: list[Tensor]) -> Tensor | None:
        """Memory for a piece's parameters in the compute dtype, where they are wanted in it: they came along, or are copied
        together on the device, or leave it (half the bytes over the bus)."""
        if piece.paired:
            return staged[3]
        if not piece.packed and piece.away.unit.home.params == "device":
            return None
        assert self.bench.rounded is not None
        return self.bench.rounded[: piece.elements]

    def _out(self, piece: Piece, parameters: Tensor) -> Moment:
        """New parameters on their way."""
        if piece.away.unit.home.params != "device":
            self.bus.moved_down += parameters.nbytes
        return self.emit(piece, parameters, self.work)


def one_kernel(device: torch.device, rule: Rule) -> ModuleType | None:
    """The module of that name, where it can be used."""
    return find_kernel(device, rule)[0]


@cache
def find_kernel(device: torch.device, rule: Rule) -> tuple[ModuleType | None, str]:
    """The module of that name, where there is Triton, it finds what it needs to compile a kernel for this device, and that
    gives the bits that torch's kernels give; or why not. What else goes wrong is a fault, and is told."""
    if device.type != "cuda" or rule.kind not in ("adamw", "adam"):
        return None, "it has none for this device" if device.type != "cuda" else f"it has none for {rule.kind}"
    try:
        from fullshard.on_torch.offload.kernels import triton_adam as found

        return (found, "") if found.agrees(rule, device) else (None, "Triton's differs from torch's on this GPU")
    except ImportError as error:
        return None, f"Triton cannot be imported ({first_line(error)})"
    except (OSError, SubprocessError) as error:
        return None, f"Triton finds no compiler that works ({first_line(error)})"
    except RuntimeError as error:
        if "C compiler" in str(error):
            return None, f"Triton finds no compiler that works ({first_line(error)})"
        raise _broken(error) from error
    except Exception as error:
        raise _broken(error) from error


def _broken(error: Exception) -> FullshardError:
    return FullshardError(
        f"the Triton kernel of the optimizer's update fails on this GPU ({type(error).__name__}: {first_line(error)}); report "
        "it, and go on without Triton: pip uninstall triton"
    )
