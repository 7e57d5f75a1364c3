"""Staging: this rank's items of a state, copied to where they will lie in its file, after which the state may change.

What does not change from save to save is made once for a layout (names, shapes, dtypes): who writes what, where it lies
in the files, the manifest's text about it, and where in memory the items are found.
"""

import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from fullshard.checkpoint.manifest import TensorRecord, field_text, tensors_text
from fullshard.checkpoint.place import Place
from fullshard.errors import FullshardError
from fullshard.on_torch.agree import decide, tally, together
from fullshard.on_torch.offload.events import DONE, DeviceStream, StreamEvent
from fullshard.on_torch.private import addresses
from fullshard.on_torch.ranks import ranks_here
from fullshard.on_torch.saving import state_tensors
from fullshard.on_torch.saving.background import Background, Patience
from fullshard.on_torch.saving.dcp_storage import (
    AtRest,
    Image,
    Layout,
    Memory,
    Part,
    Source,
    file_name,
    fitting,
    flat,
    planned_bytes,
    tensor_records,
)
from fullshard.on_torch.saving.nodes import Nodes, once_a_node
from fullshard.on_torch.state import State
from fullshard.storage.memory_limits import host_limit
from fullshard.text import bytes_text


class NotFiniteError(FullshardError):
    """A state that holds NaN or infinity: no checkpoint is made of it."""


class Copying:
    """Items on their way into the image. `finish` comes before the writing; who changes the state calls `hold` first.

    What is queued on a GPU is over at `moment`. On a CPU the copies are `left` to both: the thread that makes them gives
    way, and who waited for what it has not begun would wait for everybody else on the machine, too. `parts` are what
    the copies fill, in the file's order: their checksum is made on the way, while they are in a core's cache.
    """

    def __init__(self, moment: StreamEvent = DONE, left: Iterable[Callable[[], None]] = (), parts: Sequence[memoryview] = ()):
        self.moment, self.left, self.parts, self.over = moment, deque(enumerate(left)), parts, threading.Event()
        self.lock, self.undone, self.error = threading.Lock(), len(self.left), None
        self.made = [False] * self.undone

    error: Exception | None

    def finish(self) -> str | None:
        """Wait for all copies; the checksum of the parts, if there are any. Called once."""
        summing, self.parts = Summing(self.parts), ()  # whoever keeps a save keeps no memory with it
        while self._copy_next():
            summing.go_on(self.made)
        self.moment.wait()
        if not self.undone:
            self.over.set()
        self.over.wait()
        if self.error is not None:
            raise self.error
        summing.go_on(self.made)
        return summing.digest.hexdigest() if summing.count else None

    def hold(self) -> None:
        """What the current stream, or this thread, does next comes after the copies."""
        self.moment.hold_current()
        if self.undone:
            while self._copy_next():
                pass
            self.over.wait()

    def _copy_next(self) -> bool:
        """Make the first copy that nobody has begun, if there is one."""
        try:
            i, copy = self.left.popleft()
        except IndexError:
            return False
        try:
            copy()
        except Exception as error:
            self.error = error
        with self.lock:
            self.undone -= 1
            self.made[i] = True
            last = not self.undone
        if last:
            self.over.set()
        return True


class Summing:
    """The checksum of parts that come about in any order."""

    def __init__(self, parts: Sequence[memoryview]):
        self.left, self.count, self.digest = deque(enumerate(parts)), len(parts), xxhash.xxh3_128()

    def go_on(self, made: Sequence[bool]) -> None:
        """As far as all is made."""
        while self.left and made[self.left[0][0]]:
            self.digest.update(self.left.popleft()[1])


class Staging:
    """Collective where the state's layout is new. With `overlap` the copies run beside the next forward and backward.

    `room`: bytes of host memory that the copies may take; if not given, what this machine has left for each rank. Where
    they do not fit, nothing is copied: `in_place` says so, the file is made from the state itself, and the state must
    stay as it is until that is done.
    """

    def __init__(self, state: State, group: dist.ProcessGroup, nodes: Nodes, *, overlap: bool, room: int | None):
        self.state, self.group, self.nodes, self.overlap = state, group, nodes, overlap and may_overlap(state)
        self.room, self.in_place, self.why = room, False, ""
        self.memory = Memory(pinned=state.device.type == "cuda")
        beside: Patience = "idle" if state.device.type == "cpu" else "nice"
        self.worker = Background("checkpoint-copies", patience=beside if overlap else "none")
        self.known: list[tuple[str, torch.Size, torch.dtype]] | None = None  # what the plan was made for
        self.seen: list[Tensor] = []  # the tensors of the last save,
        self.lay: list[int] = []  # and where they lay
        self.sources: list[Source] = []  # of the items
        self.copying: Copying | None = None

    # -- at each save ----------------------------------------------------------------------------------

    def start(self, values: dict[str, Tensor], held: state_tensors.Slots | None = None) -> Copying:
        """`values`: the parameters by name; `held`: `named.all_slots`, where they are known. The items are those of this
        moment, whatever training does next."""
        held = state_tensors.all_slots(self.state) if held is None else held
        model = state_tensors.model_tensors(self.state.model, values)
        random = state_tensors.rng_tensors(self.state, dist.get_rank())
        if not self._as_before([*model.values(), *(t for s in held.values() for t in s.values() if isinstance(t, Tensor))]):
            self._find(model | state_tensors.optimizer_tensors(self.state, held), random, {f"model.{name}" for name in values})
        for i, name in self.random:
            self.sources[i] = random[name]
        self.copying = Copying() if self.in_place else self._copy()
        return self.copying

    def _as_before(self, found: list[Tensor]) -> bool:
        """Whether these are the tensors of the last save, at the same places in memory. Asked without their names, which
        would take longer to make than all that is compared."""
        if len(found) != len(self.seen) or not all(map(operator.is_, found, self.seen)):
            return False
        return addresses(found) == self.lay

    def _find(self, tensors: dict[str, Tensor], random: dict[str, Tensor], parameters: set[str]) -> None:
        """Where the items are in memory; with a new layout, which they are."""
        whole = dict(sorted((tensors | random).items()))  # the same state gives the same bytes, whoever made its entries
        known = [(n, t.shape, t.dtype) for n, t in whole.items()]
        if known != self.known:
            self._plan(whole)
            self.known = known
        self.planner.state_dict = whole
        stored = stored_items(self.state)
        names = [item.index.fqn for item in self.layout.items]
        found = [cast(Tensor, self.planner.resolve_data(item)).detach() for item in self.layout.items]
        self.sources = [stored[name] if source.is_meta else flat(source) for name, source in zip(names, found, strict=True)]
        self.seen = list(tensors.values())
        self.lay = addresses(self.seen)
        self.random = [(i, name) for i, name in enumerate(names) if name in random]
        buffers = {name for name in tensors if name.startswith("model.")} - parameters
        self.buffers = {i for i, name in enumerate(names) if name in buffers}
        self.weights = {i for i, name in enumerate(names) if name in parameters}

    def _copy(self) -> Copying:
        sources = self.sources
        if self.overlap and self.buffers:  # forward may change one while the copies run
            sources = [s.clone() if i in self.buffers and isinstance(s, Tensor) else s for i, s in enumerate(sources)]
        if self.overlap and self.state.device.type == "cuda":
            return self._copy_beside(sources)
        if self.overlap:
            return Copying(left=self.image.copies(cast(list[Tensor], sources)), parts=self.image.parts)
        self.image.fill(sources)
        return Copying(StreamEvent.here(self.state.device))

    def _copy_beside(self, sources: Sequence[Source]) -> Copying:
        """Queued on a stream of its own."""
        stream = DeviceStream(self.state.device)
        stream.after(StreamEvent.here(self.state.device))
        with stream:
            self.image.fill(sources)
            copied = stream.record()
        for source in sources:
            if isinstance(source, Tensor):
                stream.keep(source)
        return Copying(copied)

    def hold_update(self) -> None:
        """Before the state changes."""
        if self.copying is not None:
            self.copying.hold()
            self.copying = None

    def forget(self) -> None:
        """Where the items were: away units are shown for one save only."""
        self.seen, self.lay, self.sources, self.planner.state_dict = [], [], [], {}

    # -- writing ---------------------------------------------------------------------------------------

    def write(self, where: Place, known: str | None) -> str:
        """This rank's file; its checksum, which, if not `known` yet, is computed while the disk works."""
        if self.in_place:
            return self._write_in_place(where)
        for i in self.weights:
            self._refuse_poisoned(i, self.image.targets[i])
        found = self.worker.submit(self.image.checksum) if known is None else None
        where.write(self.file, self.image.memory, self.layout.nbytes)
        return known or cast(Future[str], found).result()

    def _write_in_place(self, where: Place) -> str:
        digest = xxhash.xxh3_128()

        def make(at: int, memory: memoryview) -> None:
            with torch.no_grad():
                made = torch.frombuffer(memory, dtype=torch.uint8)
                self.layout.make(self.sources, at, made)
                for i, low, high in self.layout.spans(at, at + len(memory)):
                    if i in self.weights:
                        self._refuse_poisoned(i, made[low - at : high - at].view(self.layout.dtype(i)))
            digest.update(memory)

        where.write_made(self.file, self.layout.nbytes, make)
        return digest.hexdigest()

    def _refuse_poisoned(self, i: int, values: Tensor) -> None:
        """Raise where one of a weight's values, as they go into the file, is not finite. `aminmax` hands NaN on."""
        if not values.is_floating_point() or values.element_size() < 2 or not values.numel():
            return
        if not all(math.isfinite(end) for end in torch.aminmax(values)):
            name = self.layout.items[i].index.fqn.removeprefix("model.")
            raise NotFiniteError(f"the weights in {name} are not finite")

    # -- once for a layout -----------------------------------------------------------------------------

    def _plan(self, tensors: dict[str, Tensor]) -> None:
        """Which rank writes what, by DCP's planner: copies are written once, spread over those who hold them."""
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        rank = dist.get_rank()
        self.planner.set_up_planner(tensors, None, rank == 0)
        plans = together(self.group, lambda: fitting(self.planner.create_local_plan()))
        made, metadata = decide(self.group, lambda: self.planner.create_global_plan(plans))
        if self.nodes.count > 1:  # each disk gets all that its ranks hold
            made = once_a_node(plans, self.nodes)
        mine = self.nodes.of_rank[rank]
        self.size_here = sum(planned_bytes(p) for p, node in zip(made, self.nodes.of_rank, strict=True) if node == mine)
        self.layout = Layout(self.planner.finish_plan(made[rank]).items)
        self.file = file_name(rank, dist.get_world_size())
        self.parts: list[Part] = together(self.group, lambda: self.layout.part(self.file))
        self.records: dict[str, TensorRecord] = {}
        self.texts: dict[str, str] = {}  # of the manifest: what is the same at every save
        if self.nodes.leads:
            self.records = tensor_records(metadata, self.parts, self.nodes.of_files, mine)
            plan = field_text("plan", self.state.plan.to_dict())
            self.texts = {"tensors": tensors_text(self.records), "plan": plan}
        self._make_room()

    def _make_room(self) -> None:
        """Memory for the copies, on all ranks or on none."""
        rows = tally(self.group, lambda: [self.layout.nbytes, self._room()], 2)
        short = [(needed, room) for needed, room in rows if needed > room]
        self.in_place = bool(short)
        self._drop_image()
        if short:
            needed, room = short[0]
            self.why = (
                f"a copy of {bytes_text(needed)} does not fit into the {bytes_text(max(0, room))} of host memory that it may"
                " take: training waits while a checkpoint is written"
            )
            self.memory.close()
        else:
            tally(self.group, self._make_image, 0)

    def _room(self) -> int:
        """A sixteenth stays free."""
        held = self.memory.arena.nbytes
        return host_limit() * 15 // 16 // ranks_here() + held if self.room is None else self.room

    def _make_image(self) -> list[int]:
        self.image = Image(self.layout, self.memory)
        return []

    def close(self) -> None:
        """Give the memory back."""
        if self.known is not None:
            del self.planner
            self.known, self.seen, self.lay, self.sources, self.copying = None, [], [], [], None
        self._drop_image()
        self.memory.close()
        self.worker.close()

    def _drop_image(self) -> None:
        """Its views would keep the arena's memory."""
        if hasattr(self, "image"):
            del self.image


def stored_items(state: State) -> dict[str, AtRest]:
    """What of a state is on disk, by the item's name."""
    found = state.tiers.memory.stored() if state.tiers else {}
    return {f"model.{n}" if key == "master" else f"optimizer.{n}.{key}": at for (n, key), at in found.items()}


def may_overlap(state: State) -> bool:
    """Whether all that is copied stays as it is until the optimizer's step. Units that are away are updated under backward;
    what of them rests in host memory is copied at once, but only a GPU's copies run beside those."""
    if state.optimizer is None:
        return False
    away = state.tiers.units if state.tiers else []
    return not away or (state.device.type == "cuda" and all(a.home.optimizer != "device" for a in away))
