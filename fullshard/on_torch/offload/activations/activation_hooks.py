"""Activation offload: what autograd saves in a unit's forward is copied to the host and back.

Copies to the host overlap with the forward of later units, copies back with their backward, each on a stream of its own. The
compute stream waits for them. The host waits only for activations in a file (`disk_activations`). Knows only the model's
units.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fullshard.base.errors import FullshardError
from fullshard.on_torch.offload.activations.disk_activations import ActivationFile, FileRange
from fullshard.on_torch.offload.activations.host_pool import HostBlock, HostPool
from fullshard.on_torch.offload.activations.offloaded_activations import leads, row
from fullshard.on_torch.offload.activations.spilled_storage import Forgotten, SpilledStorage
from fullshard.on_torch.private.torch_internals import StorageWeakRef
from fullshard.plan.plan import Plan, Unit
from fullshard.planner.step import saved_activations

Keep = Callable[[nn.Module, Callable[[Tensor], Any], Callable[[Any], Any]], None]
SMALL = {"cuda": saved_activations.SMALL, "cpu": 1}  # bytes: smaller tensors stay on the device


def spill_activations(
    model: nn.Module, plan: Plan, device: torch.device, keep: Keep, disk: str | Path | None = None
) -> "Activations | None":
    """Hook the modules of all units, if any unit's activations leave the device. Call before FSDP adds its hooks, which then
    run outside: parameters are gathered before and freed after. `keep`: lets what selective recomputation
    keeps of a module be packed and unpacked by two functions. `disk`: the directory for activations on disk."""
    ahead = leads(plan)
    if not ahead:
        return None
    on_disk = disk is not None and any(u.name in ahead and u.home.activations == "disk" for u in plan.units)
    activations = Activations(device, keep, reach=max(ahead.values()), disk=disk if on_disk else None)
    for unit in row(plan):
        for module in (model.get_submodule(path) for path in unit.modules):
            if unit.name in ahead:
                activations.spill(module, unit, ahead[unit.name], compiled=plan.compile)
            module.register_forward_hook(activations.passed, always_call=True)
    return activations


@dataclass(frozen=True)
class _Saved:
    """What autograd saves in place of a tensor."""

    spilled: SpilledStorage
    look: Callable[[Tensor], Tensor]  # from the storage's bytes to the tensor


@dataclass(frozen=True)
class _CopyOut:
    """A tensor that is held until its copy to the host is done."""

    tensor: Tensor
    nbytes: int
    version: int
    done: torch.cuda.Event
    until: int  # the last visit during which the copy may run


class _Visit:
    """One forward of one module: what was spilled in it, and the visit before it. Held by its autograd graph."""

    __slots__ = ("__weakref__", "before", "forwards", "home", "index", "lead", "name", "spilled")

    def __init__(self, index: int, before: "weakref.ref[_Visit] | None", unit: Unit | None = None, lead: int = 0):
        self.index, self.before, self.lead = index, before, lead
        self.name, self.home = (unit.name, unit.home.activations) if unit else ("", "device")
        self.forwards = unit is not None and unit.remat != "none"  # backward needs the first tensors first, as it recomputes
        self.spilled: list[weakref.ref[SpilledStorage]] = []

    def earlier(self) -> "_Visit | None":
        return self.before() if self.before else None


class Activations:
    """Spills and fetches. `spilled` and `fetched` count bytes since the start. `on` may be set to False between two steps, to
    compare with activations that stay. `files`: of the units whose activations are on disk."""

    def __init__(self, device: torch.device, keep: Keep, reach: int, disk: str | Path | None = None):
        cuda = device.type == "cuda"
        self.device, self.reach, self.small = device, reach, SMALL[device.type]
        self.keep, self.on = keep, True
        self.spilled = self.fetched = 0
        self.pool = HostPool(pinned=cuda)
        self.files = ActivationFile(disk, pinned=cuda) if disk is not None else None
        self.out: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None
        self.back: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None
        self.copies_out: deque[_CopyOut] = deque()
        self.copying = 0  # bytes of `copies_out`
        self.seen: dict[StorageWeakRef, weakref.ref[SpilledStorage]] = {}
        self.forgotten: deque[Forgotten] = deque()
        self.resident: set[int] = set()  # storages of parameters and buffers
        self.open: tuple[_Visit, saved_tensors_hooks] | None = None
        self.last: weakref.ref[_Visit] | None = None
        self.visits = 0
        self.idle: dict[str, str] = {}  # homes of units of which nothing was spilled, by name
        self.largest = 0  # bytes of a visit
        self.reusing = False  # freed blocks may still be read by copies back
        self.had_forward = False  # a whole one, in which something was spilled

    # -- around the forward of a module ----------------------------------------------------------------

    def spill(self, module: nn.Module, unit: Unit, lead: int, *, compiled: bool) -> None:
        """Hook a module: spill what it saves."""

        def enter(module: nn.Module, args: Any) -> None:
            if self.on and torch.is_grad_enabled():
                self._open(module, _Visit(self.visits, self.last, unit, lead))

        module.register_forward_pre_hook(enter)
        if unit.remat == "selective" and not compiled:  # a compiled block's products are saved by its graph
            self.keep(module, self.pack, self.unpack)

    def _open(self, module: nn.Module, visit: _Visit) -> None:
        with torch.no_grad():
            self.resident = {s.data_ptr() for t in (*module.parameters(), *module.buffers()) for s in _storages(t)}
        hooks = saved_tensors_hooks(self.pack, self.unpack)
        self.open = (visit, hooks)
        self.idle[visit.name] = visit.home
        hooks.__enter__()

    def passed(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module's forward has ended or failed."""
        visit = _Visit(self.visits, self.last)
        if self.open:
            visit, hooks = self.open
            self.open = None
            hooks.__exit__()
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if not torch.is_grad_enabled() or not tensors:
            return
        for tensor in tensors:
            tensor.register_hook(lambda _: self._begin(visit))
        self.largest = max(self.largest, sum(s.nbytes for s in _alive(visit)))
        if self.files:
            self.files.visited(_in_file(_alive(visit)))
        self.last = weakref.ref(visit)
        self.visits += 1
        self._release(until=visit.index)

    def reset(self) -> None:
        """A forward or backward failed: nobody waits for its copies any more."""
        if self.open:
            _, hooks = self.open
            self.open = None
            hooks.__exit__()
        for copy in self.copies_out:
            torch.cuda.current_stream(self.device).wait_event(copy.done)
        self.copies_out.clear()
        self.copying = 0

    def _begin(self, visit: _Visit) -> None:
        """Backward begins a module: fetch what the next ones need."""
        self._check_first_forward()
        self.free_forgotten()
        self._release()
        near = visit.earlier()
        for _ in range(self.reach):
            if near is None:
                break
            if visit.index - near.index <= near.lead:
                self._start_fetch(near)
            near = near.earlier()

        if self.files:  # read ahead before; copied to the device now
            self._fetch(s for s in _wanted(visit) if isinstance(s.place, FileRange))

    def _start_fetch(self, visit: _Visit) -> None:
        """Start copies from host memory to the device, and reads from the file to host memory."""
        wanted = _wanted(visit)
        if self.files:
            for place in _in_file(wanted):
                self.files.start_read(place)
        self._fetch(s for s in wanted if not isinstance(s.place, FileRange))

    def _check_first_forward(self) -> None:
        """After the first forward, raise if a unit has spilled nothing."""
        if not self.had_forward and self.idle:
            name = min(self.idle)
            raise FullshardError(
                f"unit {name}: home.activations = {self.idle[name]!r} has no effect: its forward saved no tensor of at least "
                f"{self.small} bytes; write 'device', or use a larger batch"
            )
        self.had_forward = self.spilled > 0

    # -- what autograd calls ---------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """What autograd saves in place of a tensor: where to find it."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not self.open or not self._movable(local):
            return tensor.detach()
        visit, _ = self.open
        spilled = self._find(local) or self._spill(local, visit)
        if all(ref() is not spilled for ref in visit.spilled):
            visit.spilled.append(weakref.ref(spilled))
            self.idle.pop(visit.name, None)
        return _Saved(spilled, _look(tensor, local))

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Saved):
            return packed
        spilled = packed.spilled
        if spilled.device is None:
            self._fetch([spilled])
        self._await(spilled)
        assert spilled.device is not None
        return packed.look(spilled.device)

    def _movable(self, tensor: Tensor) -> bool:
        """True if spilling the tensor would free memory."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.device != self.device:
            return False
        storage = tensor.untyped_storage()
        unusual = tensor.is_conj() or tensor.is_neg()
        return not unusual and storage.nbytes() >= self.small and storage.data_ptr() not in self.resident

    def _find(self, tensor: Tensor) -> SpilledStorage | None:
        """The tensor's storage if it is spilled already: for another view, or a table that all units share."""
        found = self.seen.get(StorageWeakRef(tensor.untyped_storage()))
        spilled = found() if found else None
        return spilled if spilled is not None and spilled.version == tensor._version else None

    # -- copies ----------------------------------------------------------------------------------------

    def _spill(self, tensor: Tensor, visit: _Visit) -> SpilledStorage:
        self.free_forgotten()
        source = _bytes(tensor)
        place = self.files.take(source.numel()) if self.files and visit.home == "disk" else self._take(source.numel())
        key = StorageWeakRef(tensor.untyped_storage())
        spilled = SpilledStorage(key, tensor._version, source.numel(), place, self.forgotten)
        self.seen[spilled.key] = weakref.ref(spilled)
        self.spilled += source.numel()
        if self.out is None:
            place.bytes.copy_(source)
        else:
            self._send(spilled, tensor, source, visit)
        if self.files and isinstance(place, FileRange):
            self.files.write(place, spilled.copied)
        return spilled

    def _send(self, spilled: SpilledStorage, tensor: Tensor, source: Tensor, visit: _Visit) -> None:
        """Start a GPU's copy to the host."""
        assert self.out is not None
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        if self.reusing and self.back is not None:
            self.out.wait_stream(self.back)
            self.reusing = False
        with torch.cuda.stream(self.out):
            spilled.place.bytes.copy_(source, non_blocking=True)
        spilled.copied = self.out.record_event()
        self.copies_out.append(
            _CopyOut(tensor.detach(), source.numel(), spilled.version, spilled.copied, visit.index + visit.lead)
        )
        self.copying += source.numel()
        self._release(until=visit.index - 1, limit=self.largest)

    def _take(self, nbytes: int) -> HostBlock:
        before = self.pool.nbytes
        block = self.pool.take(nbytes)
        if self.had_forward and self.pool.nbytes > before:
            warnings.warn(
                f"activations need {self.pool.nbytes} bytes of host memory, {self.pool.nbytes - before} more than before: "
                "a longer batch than the first",
                stacklevel=2,
            )
        return block

    def _release(self, until: int | None = None, limit: int | None = None) -> None:
        """Release tensors whose copies should be done, the oldest first: by visit, and down to `limit` bytes.

        The compute stream waits for the copies, so that it can use the memory at once. To poll for their end on the host
        would free nothing: the host is far ahead.
        """
        while self.copies_out:
            copy = self.copies_out[0]
            if until is not None and copy.until > until and not (limit and self.copying > limit):
                return
            self.copies_out.popleft()
            self.copying -= copy.nbytes
            torch.cuda.current_stream(self.device).wait_event(copy.done)
            if copy.tensor._version != copy.version:
                raise FullshardError(
                    "a tensor that is saved for backward was changed in place: write x = x + y, not x += y, "
                    "or home.activations = 'device'"
                )

    def _fetch(self, wanted: Iterable[SpilledStorage]) -> None:
        """Start copies to the device. The memory belongs to the compute stream, which frees it without a wait."""
        wanted = list(wanted)
        for spilled in wanted:
            spilled.device = torch.empty(spilled.nbytes, dtype=torch.uint8, device=self.device)
            self.fetched += spilled.device.numel()
        if self.back is not None:
            self.back.wait_stream(torch.cuda.current_stream(self.device))
            self.reusing = True
        for spilled in wanted:
            if self.files and isinstance(spilled.place, FileRange):
                self.files.await_read(spilled.place)
            self._copy_back(spilled)
            if self.files and isinstance(spilled.place, FileRange):
                self.files.release(spilled.place, spilled.fetched)

    def _copy_back(self, spilled: SpilledStorage) -> None:
        assert spilled.device is not None
        if self.back is None:
            spilled.device.copy_(spilled.place.bytes)
            return
        assert spilled.copied is not None
        self.back.wait_event(spilled.copied)
        with torch.cuda.stream(self.back):
            spilled.device.copy_(spilled.place.bytes, non_blocking=True)
        spilled.fetched = self.back.record_event()

    def _await(self, spilled: SpilledStorage) -> None:
        if spilled.fetched is not None:
            torch.cuda.current_stream(self.device).wait_event(spilled.fetched)
            spilled.fetched = None

    def free_forgotten(self) -> None:
        """Free the places of what autograd has dropped."""
        while self.forgotten:
            key, place, _, fetched = self.forgotten.popleft()
            if fetched is not None:  # what it was fetched to must not be reused before the copy is done
                torch.cuda.current_stream(self.device).wait_event(fetched)
            if isinstance(place, HostBlock):
                self.pool.give(place)
            elif self.files:
                self.files.forget(place)
            if (found := self.seen.get(key)) and found() is None:  # not a newer copy of the same storage
                del self.seen[key]


def _alive(visit: _Visit) -> list[SpilledStorage]:
    return [s for ref in visit.spilled if (s := ref()) is not None]


def _wanted(visit: _Visit) -> list[SpilledStorage]:
    """What is not on the device, in the order in which backward needs it."""
    return [s for s in _alive(visit) if s.device is None][:: 1 if visit.forwards else -1]


def _in_file(spilled: Iterable[SpilledStorage]) -> list[FileRange]:
    return [s.place for s in spilled if isinstance(s.place, FileRange)]


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor. That of a subclass is in the tensors that it wraps: a shard, or a weight in float8."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.untyped_storage()
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), Tensor):  # a DTensor of torch 2.13 also names its mesh
            yield from _storages(part)


def _bytes(tensor: Tensor) -> Tensor:
    """All of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _look(tensor: Tensor, local: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that makes `tensor` from a copy of its storage."""
    dtype, offset, size, stride = local.dtype, local.storage_offset(), local.size(), local.stride()

    def look(memory: Tensor) -> Tensor:
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, size, stride)

    if not isinstance(tensor, DTensor):
        return look
    mesh, placements, shape, strides = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return lambda memory: DTensor.from_local(look(memory), mesh, placements, run_check=False, shape=shape, stride=strides)
