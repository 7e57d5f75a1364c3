"""Whole tensors on rank 0, one at a time, when rank 0 asks for them. The other ranks serve their parts until it is done."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.base.errors import FullshardError, first_line
from fullshard.on_torch.ranks.rank_agreement import GroupAgreement
from fullshard.on_torch.tensors.shard_ranges import local_box, local_tensor

PIECE = 1 << 28  # bytes of a message
DONE, FAILED = -1, -2  # in place of a tensor's number

Box = tuple[tuple[int, int], ...]


class TensorGather:
    """The same list of sharded tensors on every rank. `read` returns the i-th with this rank's part of it in memory.

    Works over host memory: no device needs room for a whole tensor.
    """

    def __init__(self, ranks: GroupAgreement, tensors: Sequence[Tensor], read: Callable[[int], Tensor]):
        self.ranks, self.group, self.tensors, self.read = ranks, ranks.group, tensors, read
        self.failed = False  # on all ranks: all of them have raised
        self.latest: tuple[int, Tensor] | None = None  # what rank 0 fetched last: one tensor may be in several files

    def fetch(self, index: int) -> Tensor:
        """A whole tensor in host memory. On rank 0."""
        if self.latest is None or self.latest[0] != index:
            self.latest = None
            self._announce(index)
            self.latest = (index, self._collect(index))
        return self.latest[1]

    def finish(self) -> None:
        """On rank 0: let the other ranks go on."""
        self._announce(DONE)

    def fail(self, error: BaseException) -> None:
        """On rank 0: raise on the other ranks as well."""
        if not self.failed:
            self._announce(FAILED)
            said = str(error) if isinstance(error, FullshardError) else f"{type(error).__name__}: {first_line(error)}"
            dist.broadcast_object_list([f"rank 0: {said}"], src=0, group=self.group)

    def serve(self) -> None:
        """On the other ranks: give what rank 0 asks for until it is done. Raises if it fails."""
        while (index := self._announce(0)) >= 0:
            self._collect(index)
        if index == FAILED:
            said: list[Any] = [None]
            dist.broadcast_object_list(said, src=0, group=self.group)
            raise FullshardError(said[0])

    def _announce(self, number: int) -> int:
        """Rank 0's number, on all ranks."""
        message = torch.tensor(number)
        dist.broadcast(message, src=0, group=self.group)
        return int(message)

    def _collect(self, index: int) -> Tensor:
        """The whole tensor on rank 0; this rank's part on the others."""
        tensor, part = self.tensors[index], torch.empty(0)

        def prepare() -> list[int]:
            nonlocal part
            part = local_tensor(self.read(index)).detach().cpu().contiguous()
            return [bound for span in local_box(tensor) for bound in span]

        try:
            rows = self.ranks.gather_integers(prepare, 2 * tensor.ndim)
        except FullshardError:
            self.failed = True
            raise
        owners = _first_owners([tuple(zip(row[::2], row[1::2], strict=True)) for row in rows])
        if dist.get_rank() == 0:
            return self._assemble(tensor.shape, part, owners)
        if dist.get_rank() in owners.values():
            self._send(part)
        return part

    def _assemble(self, shape: torch.Size, own: Tensor, owners: dict[Box, int]) -> Tensor:
        if list(owners.values()) == [0]:
            return own
        whole = torch.empty(shape, dtype=own.dtype)
        for box, rank in owners.items():
            part = own if rank == 0 else self._receive([b - a for a, b in box], own.dtype, rank)
            whole[tuple(slice(a, b) for a, b in box)] = part
        return whole

    def _send(self, part: Tensor) -> None:
        for piece in _pieces(part):
            self.group.send([piece], 0, 0).wait()

    def _receive(self, shape: list[int], dtype: torch.dtype, rank: int) -> Tensor:
        part = torch.empty(shape, dtype=dtype)
        for piece in _pieces(part):
            self.group.recv([piece], rank, 0).wait()
        return part


def _first_owners(boxes: Sequence[Box]) -> dict[Box, int]:
    """The lowest rank that has each part. Ranks without any part are left out."""
    owners: dict[Box, int] = {}
    for rank, box in enumerate(boxes):
        if all(stop > start for start, stop in box):
            owners.setdefault(box, rank)
    return owners


def _pieces(part: Tensor) -> Sequence[Tensor]:
    return part.view(-1).view(torch.uint8).split(PIECE)
