"""Staging: copies this rank's items into the image of its file, after which the state may change.

Whatever is the same at every save is computed once for a layout (names, shapes, dtypes): which rank writes which items,
their offsets in the files, the manifest's text about them, and their addresses in memory.
"""

import math
import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from fullshard.checkpoint.background_writer import Background, Priority
from fullshard.checkpoint.file_layout import FileLayout, SaveLayout
from fullshard.checkpoint.saver import NotFiniteError
from fullshard.checkpoint.shared_disks import Nodes
from fullshard.checkpoint.staged_file import StagedFile
from fullshard.on_torch.model.changing_buffers import STATISTICS
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.private.torch_internals import addresses
from fullshard.on_torch.ranks.rank_agreement import GroupAgreement
from fullshard.on_torch.saving import state_tensors
from fullshard.on_torch.saving.file_image import FileImage, ImageBuffer, flattened
from fullshard.on_torch.saving.pending_copies import PendingCopies
from fullshard.on_torch.saving.write_items import (
    ItemSource,
    StoredItem,
    dtype_of,
    file_item,
    once_per_node,
    read_file,
    tensor_types,
    wide_first,
    without_empty_items,
)
from fullshard.on_torch.tensors.streams import DeviceStream, StreamEvent


class Staging(StagedFile):
    """Stages and writes this rank's file of each save. The first save of a layout is collective.

    With `overlap` the copies run during the next forward and backward.
    """

    def __init__(self, state: State, ranks: GroupAgreement, nodes: Nodes, *, overlap: bool, room: int | None):
        priority: Priority = "idle" if state.device.type == "cpu" else "nice"
        super().__init__(ranks, Background("checkpoint-copies", priority=priority if overlap else "normal"), room)
        self.state, self.nodes, self.overlap = state, nodes, overlap and may_overlap(state)
        self.buffer = ImageBuffer(pinned=state.device.type == "cuda")
        self.planned: list[tuple[str, torch.Size, torch.dtype]] | None = None  # the tensors that the layout is for
        self.last_tensors: list[Tensor] = []  # of the last save
        self.last_addresses: list[int] = []
        self.sources: list[ItemSource] = []  # of the layout's items
        self.copies: PendingCopies | None = None

    @property
    def layout(self) -> FileLayout:
        """Of this rank's file."""
        return self.shards.layout

    # -- at each save ----------------------------------------------------------------------------------

    def start(self, values: dict[str, Tensor], slots: state_tensors.ParameterSlots | None = None) -> PendingCopies:
        """Start to copy the state as it is now. `values`: the parameters by name; `slots`: the result of `all_slots`, if
        the caller has it."""
        slots = state_tensors.all_slots(self.state) if slots is None else slots
        model = state_tensors.model_tensors(self.state.model, values)
        rng = state_tensors.rng_tensors(self.state, self.ranks.rank)
        if not self._unchanged([*model.values(), *(t for s in slots.values() for t in s.values() if isinstance(t, Tensor))]):
            self._locate(model | state_tensors.optimizer_tensors(self.state, slots), rng, {f"model.{name}" for name in values})
        for i, name in self.rng_items:
            self.sources[i] = rng[name]
        self.copies = PendingCopies() if self.in_place else self._copy()
        return self.copies

    def _unchanged(self, tensors: list[Tensor]) -> bool:
        """Whether these are the tensors of the last save, at the same addresses. Names are not compared: making them takes
        longer than the comparison."""
        if len(tensors) != len(self.last_tensors) or not all(map(operator.is_, tensors, self.last_tensors)):
            return False
        return addresses(tensors) == self.last_addresses

    def _locate(self, tensors: dict[str, Tensor], rng: dict[str, Tensor], parameters: set[str]) -> None:
        """Find the items' sources in memory. Plan the layout first if the tensors are not those it was planned for."""
        everything = dict(sorted((tensors | rng).items()))  # equal states give equal files, in whatever order they were built
        planned = [(n, t.shape, t.dtype) for n, t in everything.items()]
        if planned != self.planned:
            self._plan(everything)
            self.planned = planned
        self.planner.state_dict = everything
        stored = stored_items(self.state)
        names = [item.index.fqn for item in self.items]
        found = [cast(Tensor, self.planner.resolve_data(item)).detach() for item in self.items]
        self.sources = [stored[name] if t.is_meta else flattened(t) for name, t in zip(names, found, strict=True)]
        self.last_tensors = list(tensors.values())
        self.last_addresses = addresses(self.last_tensors)
        self.rng_items = [(i, name) for i, name in enumerate(names) if name in rng]
        buffers = {name for name in tensors if name.startswith("model.")} - parameters
        self.buffer_items = {i for i, name in enumerate(names) if name in buffers}
        self.weight_items = {i for i, name in enumerate(names) if name in parameters}

    def _copy(self) -> PendingCopies:
        sources = self.sources
        if self.overlap and self.buffer_items:  # the next forward may change a buffer while the copies run
            sources = [s.clone() if i in self.buffer_items and isinstance(s, Tensor) else s for i, s in enumerate(sources)]
        if self.overlap and self.state.device.type == "cuda":
            return self._copy_on_side_stream(sources)
        if self.overlap:
            return PendingCopies(copies=self.image.copies(cast(list[Tensor], sources)), parts=self.image.group_bytes)
        self.image.fill(sources)
        return PendingCopies(StreamEvent.here(self.state.device))

    def _copy_on_side_stream(self, sources: Sequence[ItemSource]) -> PendingCopies:
        stream = DeviceStream(self.state.device)
        stream.after(StreamEvent.here(self.state.device))
        with stream:
            self.image.fill(sources)
            copied = stream.record()
        for source in sources:
            if isinstance(source, Tensor):
                stream.keep(source)
        return PendingCopies(copied)

    def wait_for_copies(self) -> None:
        """Called before the state changes: the current stream, or this thread, waits for the copies."""
        if self.copies is not None:
            self.copies.wait()
            self.copies = None

    def forget_sources(self) -> None:
        """Drop references to the state's tensors. Those of offloaded units are valid for one save only."""
        self.last_tensors, self.last_addresses, self.sources, self.planner.state_dict = [], [], [], {}

    # -- writing ---------------------------------------------------------------------------------------

    def copied_bytes(self) -> memoryview:
        return self.image.memory

    def check_copies(self) -> None:
        for i in self.weight_items | self.buffer_items:
            self._refuse_not_finite(i, self.image.targets[i])

    def read_state(self, start: int, memory: memoryview) -> None:
        with torch.no_grad():
            piece = torch.frombuffer(memory, dtype=torch.uint8)
            read_file(self.layout, self.sources, start, piece)
            for i, low, high in self.layout.overlaps(start, start + len(memory)):
                if i in self.weight_items | self.buffer_items:
                    values = piece[low - start : high - start].view(dtype_of(self.items[i]))
                    self._refuse_not_finite(i, values)

    def _refuse_not_finite(self, i: int, values: Tensor) -> None:
        """Raise if one of these values of item i is not finite. `aminmax` propagates NaN. Masks are buffers with infinities."""
        if not values.is_floating_point() or values.element_size() < 2 or not values.numel():
            return
        name = self.items[i].index.fqn.removeprefix("model.")
        infinite = i in self.buffer_items and name.rpartition(".")[2] not in STATISTICS
        if not all((infinite and not math.isnan(end)) or math.isfinite(end) for end in torch.aminmax(values)):
            what = f"weights in {name} are" if i in self.weight_items else f"buffer {name} is"
            raise NotFiniteError(f"the {what} not finite")

    # -- once for a layout -----------------------------------------------------------------------------

    def _plan(self, tensors: dict[str, Tensor]) -> None:
        """Let DCP's planner decide which rank writes which items. Replicated tensors are written once, by any holder."""
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        rank = self.ranks.rank
        self.planner.set_up_planner(tensors, None, rank == 0)
        local = self.ranks.gather_results(lambda: without_empty_items(self.planner.create_local_plan()))
        plans, metadata = self.ranks.decide(lambda: self.planner.create_global_plan(local))
        if self.nodes.count > 1:  # each disk gets all that its ranks hold
            plans = once_per_node(local, self.nodes)
        self.items = wide_first(self.planner.finish_plan(plans[rank]).items)
        types, plan = tensor_types(metadata), self.state.plan.to_dict()
        self.shards = SaveLayout.agree(self.ranks, self.nodes, [file_item(i) for i in self.items], types, plan)
        self._make_room()

    def _make_room(self) -> None:
        """Allocate the image on all ranks, or on none if one has no room."""
        self.find_room(self.buffer.arena.nbytes)
        self._drop_image()
        if self.in_place:
            self.buffer.close()
        else:
            self.ranks.gather_integers(self._make_image, 0)

    def _make_image(self) -> list[int]:
        self.image = FileImage(self.layout, self.items, self.buffer)
        return []

    def close(self) -> None:
        """Free the memory of the image and end the thread."""
        if self.planned is not None:
            del self.planner
            self.planned, self.last_tensors, self.last_addresses, self.sources, self.copies = None, [], [], [], None
        self._drop_image()
        self.buffer.close()
        self.worker.close()

    def _drop_image(self) -> None:
        """The image's views would keep the arena's memory alive."""
        if hasattr(self, "image"):
            del self.image


def stored_items(state: State) -> dict[str, StoredItem]:
    """The items of a state that are on disk, or stored in another form than the checkpoint's, by name."""
    found = state.offload.memory.stored() if state.offload else {}
    named = {f"model.{n}" if key == "master" else f"optimizer.{n}.{key}": at for (n, key), at in found.items()}
    return {**named, **state_tensors.coded_items(state)}


def may_overlap(state: State) -> bool:
    """Whether the copies may run beside training: everything copied must stay unchanged until the optimizer's step.

    Offloaded units are updated during backward. Their state in host memory is copied at once, and only a GPU's copies can
    run beside that. Moments that are stored as bytes are decoded on the way, at once.
    """
    if state.optimizer is None or state_tensors.coded_optimizer(state) is not None:
        return False
    away = state.offload.units if state.offload else []
    return not away or (state.device.type == "cuda" and all(a.home.optimizer != "device" for a in away))
