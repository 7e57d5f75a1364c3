"""Where the bytes of away units rest: one arena of host memory, the device itself, or a file.

Hands out the memory of a piece's master and moments, takes new parameters to where shards rest, and brings shards to
the device before FSDP gathers from them. Knows nothing of updates.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.on_torch.dtypes import PLAN_DTYPES
from fullshard.on_torch.offload.events import DONE, Moment, Stream
from fullshard.on_torch.offload.kernels.adam import Rule, rule_of
from fullshard.on_torch.offload.stores.disk_params import Filed
from fullshard.on_torch.offload.stores.disk_state import Spooled, Stored
from fullshard.on_torch.offload.stores.packed import Packed
from fullshard.on_torch.offload.stores.packing import halves
from fullshard.on_torch.offload.units import Away, Piece, away_units, gradient_dtype, local, shadow
from fullshard.on_torch.offload.updates.buffers import segment_views
from fullshard.on_torch.offload.updates.cpu_share import measured_share
from fullshard.on_torch.private import GatherGroup, gather_group
from fullshard.on_torch.ranks import ranks_here
from fullshard.optimizer import Optimizer
from fullshard.plan import Plan
from fullshard.storage.host import Arena, refuse_more_than, room
from fullshard.update_pieces import DISK_SLOTS, READ_SLOTS, TRAYS, WRITE_SLOTS, deal, filed


class Resting:
    """The memory of all away units of one rank."""

    def __init__(
        self,
        units: list[Away],
        groups: dict[str, GatherGroup],
        plan: Plan,
        device: torch.device,
        rule: Rule,
        *,
        cpu_share: float,
        disk: Path | None,
        ranks_here: int,
    ):
        self.units, self.groups, self.plan, self.device, self.rule = units, groups, plan, device, rule
        self.master, self.compute = PLAN_DTYPES[plan.precision.master], PLAN_DTYPES[plan.precision.compute]
        pieces = [p for a in units for p in a.pieces]
        for piece, lane in zip(pieces, deal(len(pieces), cpu_share), strict=True):
            piece.lane = lane if piece.away.unit.home.optimizer != "device" else "gpu"
            home = piece.away.unit.home
            piece.packed = plan.packs(home, rule.slots) and (piece.lane == "gpu" or home.params == "host")
        self.largest = max((p.elements for p in pieces), default=0)
        nbytes = room(self._sizes())
        why = "the optimizer's state and parameters in host memory"
        refuse_more_than(nbytes, ranks_here, why)
        self.arena = Arena(nbytes, device.type == "cuda", why)
        self.flats = {id(a): self._flats(a) for a in units if a.unit.home.optimizer != "disk"}
        spooled = [a for a in units if a.unit.home.optimizer == "disk"]
        self.spooled: Spooled | None = None
        if spooled:
            assert disk is not None
            self.spooled = Spooled(spooled, rule, self.master, disk, self.arena, self.largest)
        self.shards = {id(a): self._take(self._apart(a), self.compute) for a in units if a.unit.home.params == "host"}
        on_disk = [a for a in units if a.unit.home.params == "disk"]
        self.filed: Filed | None = None
        if on_disk:
            assert disk is not None
            self.filed = Filed(on_disk, self.compute, disk, self.arena, self.largest)
        self.changed: dict[int, Moment] = {}  # by piece: when its memory holds the last update
        self.views: dict[int, list[Tensor]] = {}  # by piece: its master and moments
        self.shard_views: dict[int, list[Tensor]] = {}  # by piece: where its segments' parameters rest
        self.packed = Packed(pieces, self._wide, self.shards_of, device)
        self.up = Stream(device)
        self.fetched: dict[int, Moment] = {}
        self.fetched_bytes = 0  # shards up
        self.consumed = DONE  # the last shard that was brought up has been gathered from

    # -- memory ------------------------------------------------------------------------------------------

    def _sizes(self) -> list[int]:
        """Bytes of everything that will be taken from the arena, one by one."""
        master, compute = self.master.itemsize, self.compute.itemsize
        sizes: list[int] = []
        for a in self.units:
            if a.unit.home.optimizer == "host":
                sizes += [a.elements * master, *[a.moving * master] * self.rule.slots]
            if a.unit.home.params == "host":
                sizes.append(self._apart(a) * compute)
        cores = min(TRAYS, sum(p.lane == "cpu" for a in self.units for p in a.pieces))
        sizes += [self.largest * gradient_dtype(self.plan).itemsize] * cores
        sizes += [self.largest * compute] * cores if self.sends else []
        if any(a.unit.home.optimizer == "disk" for a in self.units):
            sizes += [self.largest * master] * DISK_SLOTS * (1 + self.rule.slots)
        if on_disk := [filed(a.elements, a.moving, compute) for a in self.units if a.unit.home.params == "disk"]:
            sizes += [max(on_disk)] * READ_SLOTS + [self.largest * compute] * WRITE_SLOTS
        return sizes

    def _pairs(self, away: Away) -> bool:
        return self.plan.pairs(away.unit.home, self.rule.slots)

    def _apart(self, away: Away) -> int:
        """Elements of the host's memory that is for a unit's parameters alone: where the others lie beside what is left of
        their master, the frozen ones, which have no moment to take a mark along."""
        return away.elements - away.moving if self._pairs(away) else sum(away.padded)

    @property
    def sends(self) -> bool:
        """Whether the cores send new parameters to the device."""
        return any(p.lane == "cpu" and a.unit.home.params == "device" for a in self.units for p in a.pieces)

    def _take(self, elements: int, dtype: torch.dtype) -> Tensor:
        return self.arena.take(elements * dtype.itemsize).view(dtype)

    def _flats(self, away: Away) -> list[Tensor]:
        sizes = [away.elements, *[away.moving] * self.rule.slots]
        if away.unit.home.optimizer == "device":
            return [torch.zeros(n, dtype=self.master, device=self.device) for n in sizes]
        return [self._take(n, self.master) for n in sizes]

    # -- a lane's store ------------------------------------------------------------------------------------

    def open(self, piece: Piece) -> tuple[list[Tensor], Moment]:
        if piece.away.unit.home.optimizer == "disk":
            return self._spooled.open(piece)
        if piece.number not in self.views:
            self.views[piece.number] = self.packed.views(piece) if piece.packed else self._wide(piece)
        return self.views[piece.number], self.changed.get(piece.number, DONE)

    def _wide(self, piece: Piece) -> list[Tensor]:
        return [t[piece.start : piece.stop] for t in self.flats[id(piece.away)]]

    def close(self, piece: Piece, changed: Moment | None) -> None:
        if changed is None and piece.away.unit.home.params == "disk":
            self._filed.skip(piece)
        if piece.away.unit.home.optimizer == "disk":
            self._spooled.close(piece, changed)
        elif changed is not None:
            self.changed[piece.number] = changed

    def expect(self, pieces: list[Piece]) -> None:
        """These will be opened, in this order."""
        if self.spooled is not None:
            self.spooled.expect([p for p in pieces if p.away.unit.home.optimizer == "disk"])

    def renew(self, units: list[Away]) -> None:
        """These have their gradients, and are updated now: each piece is closed once."""
        if self.filed is not None:
            self.filed.renew([a for a in units if a.unit.home.params == "disk"])

    def watch(self, look: Callable[[], None]) -> None:
        """`look` raises if those who update are in trouble: whoever waits for them asks now and then."""
        if self.filed is not None:
            self.filed.look = look

    def begin(self) -> None:
        """A step begins."""
        self.packed.pack()
        if self.filed is not None:
            self.filed.begin()

    def end(self) -> None:
        """A step has gathered for the last time."""
        if self.filed is not None:
            self.filed.rewind()

    def settle(self) -> None:
        """Wait until every change is at rest."""
        for moment in self.changed.values():
            moment.wait()
        if self.spooled is not None:
            self.spooled.settle()
        if self.filed is not None:
            self.filed.settle()

    # -- parameters ----------------------------------------------------------------------------------------

    def emit(self, piece: Piece, values: Tensor, stream: Stream) -> Moment:
        """New parameters, to where the unit's shards rest."""
        if piece.away.unit.home.params == "disk":
            return self._filed.emit(piece, values, stream)
        sources = [values[s.offset : s.offset + s.stop - s.start] for s in piece.segments]
        torch._foreach_copy_(self.shards_of(piece), sources, non_blocking=True)
        return stream.moment()

    def shards_of(self, piece: Piece) -> list[Tensor]:
        """Where the piece's parameters rest, by segment."""
        if piece.number not in self.shard_views:
            self.shard_views[piece.number] = self._find_shards(piece)
        return self.shard_views[piece.number]

    def _find_shards(self, piece: Piece) -> list[Tensor]:
        away = piece.away
        if away.unit.home.params == "device":
            return [local(away.params[s.parameter]).view(-1)[s.start : s.stop] for s in piece.segments]
        if piece.paired:
            return segment_views(halves(self._wide(piece)[0])[1], piece, flat=True)
        starts, shards = _starts(away), self.shards[id(away)]
        return [shards[starts[s.parameter] + s.start : starts[s.parameter] + s.stop] for s in piece.segments]

    def fetch(self, away: Away, after: list[Moment]) -> Moment:
        """Bring a unit's shards to the device, for one gather."""
        self.packed.pack()  # an evaluation may follow a save
        shelf = self._filed.fetch(away) if away.unit.home.params == "disk" else None
        with self.up, torch.no_grad():
            self.up.after(self.consumed, *after)
            there = {}
            for p, memory in self.groups[away.unit.name].buffers():
                memory.untyped_storage().resize_(memory.numel() * memory.element_size())
                there[id(p)] = memory
            sources = self._on_host(away) if shelf is None else self._filed.parts(away, shelf)
            targets = [there[id(away.params[i])][at : at + part.numel()] for i, at, part in sources]
            torch._foreach_copy_(targets, [part for _, _, part in sources], non_blocking=True)
            self.fetched_bytes += sum(t.nbytes for t in targets)
            self.fetched[id(away)] = moment = self.up.moment()
        if shelf is not None:
            self._filed.put_back(shelf, moment)
        return moment

    def _on_host(self, away: Away) -> list[tuple[int, int, Tensor]]:
        """(parameter, where in the memory that it is gathered from, values) of a unit's shards."""
        if self._pairs(away):
            every = [pair for piece in away.pieces for pair in zip(piece.segments, self.shards_of(piece), strict=True)]
            frozen = range(away.trained, len(away.params))
            return [(s.parameter, s.start, part) for s, part in every] + [(i, 0, self._own(away, i)) for i in frozen]
        spans = zip(_starts(away), away.padded, strict=True)
        return [(i, 0, self.shards[id(away)][at : at + size]) for i, (at, size) in enumerate(spans)]

    def _own(self, away: Away, index: int) -> Tensor:
        """Where a parameter lies in the memory that is for parameters alone."""
        low, high = away.spans[index]
        at = low - away.moving if self._pairs(away) else _starts(away)[index]
        return self.shards[id(away)][at : at + high - low]

    def arrived(self, away: Away) -> None:
        """The current stream goes on when the unit's shards are on the device."""
        self.fetched.get(id(away), DONE).hold_current()

    def release(self, away: Away) -> None:
        """The current stream has gathered from the shards: their memory on the device may go."""
        self.consumed = Moment.here(self.device)
        self._drop(away)

    # -- from and to tensors ---------------------------------------------------------------------------------

    def elsewhere(self) -> dict[int, Tensor]:
        """For each parameter of an away unit, the memory that its initial value goes to."""
        found: dict[int, Tensor] = {}
        for away in self.units:
            flat = self.flats[id(away)][0] if away.unit.home.optimizer != "disk" else self._spooled.fresh(away)[0]
            found |= {id(p): away.view(flat, i) for i, p in enumerate(away.params)}
        return found

    def memory(self, away: Away) -> list[Tensor]:
        """A unit's master and moments in memory; where they rest on disk, a copy, until `give_back`."""
        self.packed.widen()
        return self.flats[id(away)] if away.unit.home.optimizer != "disk" else self._spooled.borrow(away)

    def give_back(self, *, changed: bool) -> None:
        """Nobody looks at whole units any more."""
        self.packed.looked_at = False
        for away in self.units:
            if away.unit.home.optimizer == "disk":
                self._spooled.give_back(away, changed=changed)

    @property
    def _filed(self) -> Filed:
        assert self.filed is not None
        return self.filed

    @property
    def _spooled(self) -> Spooled:
        assert self.spooled is not None
        return self.spooled

    def install(self, model: nn.Module) -> None:
        """Give the model its shards in the compute dtype; the master stays behind, a parameter's initial value in it."""
        for away in self.units:
            flat = self.memory(away)[0]
            for i, name in enumerate(away.names):
                p = model.get_parameter(name)
                master = away.view(flat, i)
                if local(p).data_ptr() != master.data_ptr():  # a model that came with values
                    master.copy_(local(p))
                new = nn.Parameter(shadow(p, local(p).to(self.device, self.compute, copy=True)), requires_grad=p.requires_grad)
                new.grad_dtype = None  # gradients come in the reduce dtype
                _replace(model, p, new)
                away.params[i] = new
            self.groups[away.unit.name].adopt()
            self._put_away(away)
            if away.unit.home.optimizer == "disk":
                self._spooled.give_back(away, changed=True)

    def publish(self, away: Away) -> None:
        """New shards from the master, after it was written to."""
        flat = self.memory(away)[0]
        if away.unit.home.params == "disk":
            return self._filed.publish(away, flat)
        for i, p in enumerate(away.params):
            values = away.view(flat, i)
            if away.unit.home.params == "device":
                local(p).copy_(values)
            elif i >= away.trained or not self._pairs(away):  # what rests in pairs is made when it is packed again
                self._own(away, i).copy_(values.reshape(-1))

    def _put_away(self, away: Away) -> None:
        if away.unit.home.params != "device":
            self.publish(away)
            self._drop(away)

    def _drop(self, away: Away) -> None:
        for _, memory in self.groups[away.unit.name].buffers():
            memory.untyped_storage().resize_(0)

    def tensors(self, away: Away, *, at_rest: bool = False) -> list[dict[str, Tensor]]:
        """For each parameter its master and moments, as tensors cut like it, until `give_back`. `at_rest`: those on disk
        stay there, and are shown on meta."""
        self.packed.looked_at = True
        flats = self._meta(away) if at_rest and away.unit.home.optimizer == "disk" else self.memory(away)
        found = []
        for i, p in enumerate(away.params):
            views = {"master": shadow(p, away.view(flats[0], i))}
            if i < away.trained:
                views |= {k: shadow(p, away.view(f, i)) for k, f in zip(self.rule.keys, flats[1:], strict=True)}
            found.append(views)
        return found

    def _meta(self, away: Away) -> list[Tensor]:
        sizes = [away.elements, *[away.moving] * self.rule.slots]
        return [torch.empty(n, dtype=self.master, device="meta") for n in sizes]

    def stored(self) -> dict[tuple[str, str], Stored]:
        """What rests on disk, by the parameter's name and `master` or the moment's key."""
        found: dict[tuple[str, str], Stored] = {}
        for away in self.spooled.units if self.spooled else ():
            for i, name in enumerate(away.names):
                keys = ["master", *(self.rule.keys if i < away.trained else ())]
                found |= {(name, key): Stored(self._spooled, away, which, i) for which, key in enumerate(keys)}
        return found

    def close_all(self) -> None:
        if self.spooled is not None:
            self.spooled.close_file()
        if self.filed is not None:
            self.filed.close_file()
        self.arena.close()


def make_resting(
    model: nn.Module,
    plan: Plan,
    modules: dict[str, list[FSDPModule]],
    device: torch.device,
    optimizer: Optimizer | None,
    disk: str | Path | None,
    cpu_share: float | None,
) -> Resting | None:
    """Memory for the plan's away units, if it has any. After FSDP, while parameters are still on meta."""
    groups = {n: g for n, found in modules.items() for m in found[:1] if (g := gather_group(m)) is not None}
    units = away_units(model, plan, groups)
    if not units:
        return None
    assert optimizer is not None
    rule = rule_of(optimizer)
    share = plan.cpu_share if cpu_share is None else cpu_share
    sent = gradient_dtype(plan).itemsize + PLAN_DTYPES[plan.precision.compute].itemsize
    state = (1 + rule.slots) * PLAN_DTYPES[plan.precision.master].itemsize
    streamed = min(state - plan.bytes_in_parameter(a.unit.home, rule.slots) for a in units)
    share = measured_share(device, rule, streamed, sent) if share is None else share
    path = Path(disk) if disk is not None else None
    return Resting(units, groups, plan, device, rule, cpu_share=share, disk=path, ranks_here=ranks_here())


def _starts(away: Away) -> list[int]:
    """Where each parameter's padded shard begins in the host's memory for them."""
    return [0, *itertools.accumulate(away.padded)][:-1]


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Everywhere: tied parameters stay tied."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is old:
                module._parameters[name] = new
