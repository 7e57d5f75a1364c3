"""One storage that was spilled, and what it leaves when autograd drops it."""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.on_torch.offload.activations.disk_activations import FileRange
from fullshard.on_torch.offload.activations.host_pool import HostBlock
from fullshard.on_torch.private.torch_internals import StorageWeakRef


class Forgotten(NamedTuple):
    """What a deleted `SpilledStorage` leaves: its place, and if it was fetched but not used, what it was fetched to."""

    key: StorageWeakRef
    place: HostBlock | FileRange
    unused: Tensor | None
    fetched: torch.cuda.Event | None


class SpilledStorage:
    """One storage's bytes in host memory or in a file, and on the device again once fetched. Autograd holds it. When it is
    deleted, what it leaves is in `forgotten`."""

    __slots__ = ("__weakref__", "copied", "device", "fetched", "forgotten", "key", "nbytes", "place", "version")

    def __init__(self, key: StorageWeakRef, version: int, nbytes: int, place: HostBlock | FileRange, forgotten: deque[Forgotten]):
        self.key, self.version, self.nbytes, self.place, self.forgotten = key, version, nbytes, place, forgotten
        self.device: Tensor | None = None
        self.copied: torch.cuda.Event | None = None  # to the host
        self.fetched: torch.cuda.Event | None = None  # back to the device; None once the compute stream has waited for it

    def __del__(self) -> None:
        # The garbage collector may call this anywhere and on any thread, also while another place is being freed: so it only
        # appends, which nothing interrupts.
        unused = self.device if self.fetched is not None else None
        self.forgotten.append(Forgotten(self.key, self.place, unused, self.fetched))
