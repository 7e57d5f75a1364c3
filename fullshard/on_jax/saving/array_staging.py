"""Staging: copies this process's parts of a state's arrays into the image of its file, after which a step may donate them."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fullshard.base.direct_io import aligned, aligned_size
from fullshard.checkpoint.background_writer import Background
from fullshard.checkpoint.file_layout import FileItem, SaveLayout, write_once
from fullshard.checkpoint.manifest_records import TensorTypes
from fullshard.checkpoint.saver import NotFiniteError
from fullshard.checkpoint.shared_disks import Nodes
from fullshard.checkpoint.staged_file import StagedFile
from fullshard.on_jax.saving.state_arrays import Check, HostOrDevice, array_types
from fullshard.on_jax.tensors.stacked_arrays import LayerSlice
from fullshard.ranks.agreement import RankAgreement

AHEAD = 8  # copies from a device that are under way at once
EXPONENTS = {
    "F64": (np.uint64, 0x7FF << 52),
    "F32": (np.uint32, 0xFF << 23),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
PIECE = 1 << 20  # elements that are looked at in one go

Bytes = np.ndarray  # one-dimensional, of uint8
NOTHING_READ: tuple[int, Bytes] = (-1, np.empty(0, np.uint8))


@dataclass
class CopiesMade:
    """Copies that are made when `ArrayStaging.start` returns, or are not needed."""

    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.done.set()


class ArrayStaging(StagedFile):
    """Stages and writes this process's file of each save. The first save of a layout is collective."""

    def __init__(self, ranks: RankAgreement, nodes: Nodes, plan: dict[str, Any], *, room: int | None):
        super().__init__(ranks, Background("checkpoint-checksum"), room)
        self.nodes, self.plan = nodes, plan
        self.planned: TensorTypes | None = None  # the tensors that the layout is for
        self.image: memoryview | None = None  # the file's bytes
        self.sources: Sequence[HostOrDevice] = ()  # of the layout's items, in place
        self.last = NOTHING_READ  # the item that was read last in place, and its bytes
        self.checked: Mapping[str, Check] = {}

    # -- at each save ----------------------------------------------------------------------------------

    def start(self, arrays: Mapping[str, HostOrDevice], checked: Mapping[str, Check]) -> CopiesMade:
        """Copy the arrays as they are now. `checked`: what the writing demands of those with these names."""
        self.checked = checked
        named = dict(sorted(arrays.items()))  # equal states give equal files, in whatever order they were built
        held = {(name, start): part for name, array in named.items() for start, part in parts(array).items()}
        types = array_types(named)
        if types != self.planned:
            self._agree(types, held)
            self.planned = types
        sources = [held[item.name, item.start] for item in self.shards.layout.items]
        self.last = NOTHING_READ
        if self.in_place:
            self.sources = sources
        else:
            self._copy(sources)
        return CopiesMade()

    def _copy(self, sources: Sequence[HostOrDevice]) -> None:
        layout, ahead = self.shards.layout, deque[HostOrDevice]()
        assert self.image is not None
        for i, (item, at) in enumerate(zip(layout.items, layout.starts, strict=True)):
            for source in sources[i + len(ahead) : i + AHEAD]:
                ahead.append(_started(source))
            np.copyto(np.frombuffer(self.image, np.uint8, item.nbytes, at), as_bytes(ahead.popleft()))

    # -- writing ---------------------------------------------------------------------------------------

    def copied_bytes(self) -> memoryview:
        assert self.image is not None
        return self.image

    def check_copies(self) -> None:
        layout, image = self.shards.layout, self.copied_bytes()
        for item, at in zip(layout.items, layout.starts, strict=True):
            self._refuse_not_finite(item, np.frombuffer(image, np.uint8, item.nbytes, at))

    def read_state(self, start: int, memory: memoryview) -> None:
        layout = self.shards.layout
        header = layout.header[start : start + len(memory)]
        memory[: len(header)] = header
        for i, low, high in layout.overlaps(start, start + len(memory)):
            if i != self.last[0]:
                self.last = i, as_bytes(_started(self.sources[i]))
                self._refuse_not_finite(layout.items[i], self.last[1])
            memory[low - start : high - start] = self.last[1][low - layout.starts[i] : high - layout.starts[i]].data

    def forget_sources(self) -> None:
        """Drop references to the state's arrays."""
        self.sources, self.last = (), NOTHING_READ

    def _refuse_not_finite(self, item: FileItem, data: Bytes) -> None:
        """Raise if an item holds what must not be saved."""
        check = self.checked.get(item.name)
        if check is not None and not _is_finite(item.dtype, data, infinity=check.infinity):
            what = "NaN" if check.infinity else "not finite"
            raise NotFiniteError(f"the {check.kind} in {item.name.removeprefix('model.')} are {what}")

    def close(self) -> None:
        """Free the memory of the image and end the thread."""
        self.image, self.planned = None, None
        self.forget_sources()
        self.worker.close()

    # -- once for a layout -----------------------------------------------------------------------------

    def _agree(self, types: TensorTypes, held: Mapping[tuple[str, tuple[int, ...]], HostOrDevice]) -> None:
        """Agree on who writes what. Parts that several processes hold are written once, by the one with the least to write."""
        own = [FileItem(name, types[name][1], types[name][0], start, tuple(part.shape)) for (name, start), part in held.items()]
        own = [item for item in own if item.nbytes]
        if self.ranks.world > 1:
            found = self.ranks.gather([[i.name, i.start, i.nbytes] for i in own])
            everywhere = [[((name, tuple(start)), nbytes) for name, start, nbytes in items] for items in found]
            mine = write_once(everywhere, self.nodes)[self.ranks.rank]
            own = [item for item in own if (item.name, item.start) in mine]
        self.shards = SaveLayout.agree(self.ranks, self.nodes, own, types, self.plan)
        self._make_room()

    def _make_room(self) -> None:
        """Allocate the image on all processes, or on none if one has no room."""
        needed, held = self.shards.layout.nbytes, len(self.image) if self.image is not None else 0
        self.find_room(held)
        if self.in_place:
            self.image = None
        elif self.image is None or len(self.image) != aligned_size(needed):
            self.image = None  # before the new one is allocated
            self.image = aligned(needed)
        if self.image is not None:
            self.image[: len(self.shards.layout.header)] = self.shards.layout.header


def parts(array: HostOrDevice) -> dict[tuple[int, ...], HostOrDevice]:
    """The parts of an array that this process's devices hold, each once, by where they begin."""
    if isinstance(array, LayerSlice):
        return dict(array.parts())
    if not isinstance(array, jax.Array):
        return {(0,) * array.ndim: array}
    at = lambda index: tuple(s.indices(size)[0] for s, size in zip(index, array.shape, strict=True))
    return {at(shard.index): shard.data for shard in reversed(array.addressable_shards)}


def _started(source: HostOrDevice) -> HostOrDevice:
    """The same array, on its way to the host. It is an object of its own, since JAX keeps what it copies with the array."""
    if isinstance(source, LayerSlice):
        source = source.taken()
    if not isinstance(source, jax.Array):
        return source
    own = jax.make_array_from_single_device_arrays(source.shape, source.sharding, [source])
    own.copy_to_host_async()
    return own


def as_bytes(values: HostOrDevice) -> Bytes:
    """The bytes of an array, on the host."""
    return np.ascontiguousarray(np.asarray(values)).reshape(-1).view(np.uint8)


def _is_finite(dtype: str, data: Bytes, *, infinity: bool) -> bool:
    """Whether no number is NaN or, unless it may be, infinite: all bits of the exponent are set, and for NaN others besides."""
    if dtype not in EXPONENTS:
        return True
    kind, exponent = EXPONENTS[dtype]
    unsigned, most = kind(exponent | (exponent & -exponent) - 1), kind(exponent if infinity else exponent - 1)
    bits = data.view(kind)
    return not any(((bits[at : at + PIECE] & unsigned) > most).any() for at in range(0, len(bits), PIECE))
