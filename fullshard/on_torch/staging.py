"""Staging: this rank's items of a state, copied to where they will lie in its file, after which the state may change.

What does not change from save to save is made once for a layout (names, shapes, dtypes): who writes what, where it lies
in the files, the manifest's text about it, and where in memory the items are found.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from fullshard.checkpoint.manifest import TensorRecord, tensors_text
from fullshard.on_torch import named
from fullshard.on_torch.agree import decide, together
from fullshard.on_torch.nodes import Nodes, once_a_node
from fullshard.on_torch.private import address
from fullshard.on_torch.state import State
from fullshard.on_torch.storage import ALL, Image, Memory, Part, file_name, fitting, planned_bytes, tensor_records
from fullshard.on_torch.streams import DONE, Moment, Stream


class Copying:
    """Items on their way into the image. Whoever writes calls `finish` first; who changes the state calls `hold` before.

    What is queued on a GPU is over at `moment`. On a CPU the copies are `left` to both: the writing thread is one that
    gives way, and who waits for a copy that it has not begun would wait for everybody else on the machine, too.
    """

    def __init__(self, moment: Moment = DONE, left: Iterable[Callable[[], None]] = ()):
        self.moment, self.left, self.over = moment, deque(left), threading.Event()
        self.lock, self.undone, self.error = threading.Lock(), len(self.left), None

    error: Exception | None

    def finish(self) -> None:
        self._help()
        self.moment.wait()
        if not self.undone:
            self.over.set()
        self.over.wait()
        if self.error is not None:
            raise self.error

    def hold(self) -> None:
        """What the current stream, or this thread, does next comes after the copies."""
        self.moment.hold_current()
        if self.undone:
            self._help()
            self.over.wait()

    def _help(self) -> None:
        """Make the copies that nobody has begun."""
        while True:
            try:
                copy = self.left.popleft()
            except IndexError:
                return
            try:
                copy()
            except Exception as error:
                self.error = error
            with self.lock:
                self.undone -= 1
                last = not self.undone
            if last:
                self.over.set()


class Staging:
    """Collective where the layout is new. With `overlap` the copies run beside the next forward and backward."""

    def __init__(self, state: State, group: dist.ProcessGroup, nodes: Nodes, *, overlap: bool):
        self.state, self.group, self.nodes, self.overlap = state, group, nodes, overlap and may_overlap(state)
        self.memory = Memory(pinned=state.device.type == "cuda")
        self.layout: list[tuple[str, torch.Size, torch.dtype]] | None = None  # what the plan was made for
        self.seen: list[tuple[Tensor, int]] = []  # the tensors of the last save, and where they lay
        self.sources: list[Tensor] = []  # of the image's items
        self.copying: Copying | None = None

    # -- at each save ----------------------------------------------------------------------------------

    def start(self, values: dict[str, Tensor]) -> Copying:
        """`values`: the parameters by name. The items are those of this moment, whatever training does next."""
        tensors = named.model_tensors(self.state.model, values) | named.optimizer_tensors(self.state)
        random = named.rng_tensors(self.state, dist.get_rank())
        if not self._as_before(tensors):
            self._find(tensors, random, {f"model.{name}" for name in values})
        for i, name in self.random:
            self.sources[i] = random[name]
        sources = [source.clone() if i in self.buffers else source for i, source in enumerate(self.sources)]
        self.copying = self._copy(sources)
        return self.copying

    def _as_before(self, tensors: dict[str, Tensor]) -> bool:
        """Whether these are the tensors of the last save, at the same places in memory."""
        found = tensors.values()
        if len(found) != len(self.seen):
            return False
        return all(t is seen and address(t) == at for t, (seen, at) in zip(found, self.seen, strict=True))

    def _find(self, tensors: dict[str, Tensor], random: dict[str, Tensor], parameters: set[str]) -> None:
        """Where the items are in memory; with a new layout, which they are."""
        whole = dict(sorted((tensors | random).items()))  # the same state gives the same bytes, whoever made its entries
        layout = [(n, t.shape, t.dtype) for n, t in whole.items()]
        if layout != self.layout:
            self._plan(whole)
            self.layout = layout
        self.planner.state_dict = whole
        self.sources = [cast(Tensor, self.planner.resolve_data(item)) for item in self.image.items]
        self.seen = [(t, address(t)) for t in tensors.values()]
        names = [item.index.fqn for item in self.image.items]
        self.random = [(i, name) for i, name in enumerate(names) if name in random]
        # Forward may change a buffer while the copies run.
        kept = {name for name in tensors if name.startswith("model.")} - parameters if self.overlap else set()
        self.buffers = {i for i, name in enumerate(names) if name in kept}

    def _copy(self, sources: Sequence[Tensor]) -> Copying:
        if self.state.device.type == "cuda":
            return self._copy_from_device(sources)
        if self.overlap:
            return Copying(left=[partial(self._fill, sources, group) for group in self.image.groups])
        self._fill(sources)
        return Copying()

    def _fill(self, sources: Sequence[Tensor], group: slice = ALL) -> None:
        with torch.no_grad():
            self.image.fill(sources, group)

    def _copy_from_device(self, sources: Sequence[Tensor]) -> Copying:
        """Queued: on a stream of its own, or on the current one, where what follows comes after it."""
        if not self.overlap:
            self._fill(sources)
            return Copying(Moment.here(self.state.device))
        stream = Stream(self.state.device)
        stream.after(Moment.here(self.state.device))
        with stream:
            self._fill(sources)
            copied = stream.moment()
        for source in sources:
            stream.keep(source)
        return Copying(copied)

    def hold_update(self) -> None:
        """Before the state changes."""
        if self.copying is not None:
            self.copying.hold()
            self.copying = None

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
        self.image = Image(self.planner.finish_plan(made[rank]).items, self.memory)
        self.file = file_name(rank, dist.get_world_size())
        self.parts: list[Part] = together(self.group, lambda: self.image.part(self.file))
        self.records: dict[str, TensorRecord] = {}
        self.text = ""
        if self.nodes.leads:
            self.records = tensor_records(metadata, self.parts, self.nodes.of_files, mine)
            self.text = tensors_text(self.records)

    def close(self) -> None:
        """Give the memory back."""
        if self.layout is not None:
            del self.image, self.planner  # their views would keep the arena's memory
            self.layout, self.seen, self.sources, self.copying = None, [], [], None
        self.memory.close()


def may_overlap(state: State) -> bool:
    """Whether all that is copied stays as it is until the optimizer's step. Units that are away are updated under backward;
    what of them rests in host memory is copied at once, but only a GPU's copies run beside those."""
    if state.optimizer is None:
        return False
    away = state.tiers.units if state.tiers else []
    return not away or (state.device.type == "cuda" and all(a.unit.home.optimizer != "device" for a in away))
