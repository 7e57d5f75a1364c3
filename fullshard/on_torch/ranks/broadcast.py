"""Rank 0's values for all ranks, before a model is sharded."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.base.errors import FullshardError
from fullshard.on_torch.ranks.rank_agreement import GroupAgreement


def broadcast_values(model: nn.Module) -> None:
    """Give all ranks rank 0's values of parameters and buffers, a tensor at a time. What is on meta has none yet. Collective."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ranks = GroupAgreement()
    _refuse_other_models(ranks.gather({n: (tuple(t.shape), str(t.dtype), t.is_meta) for n, t in tensors.items()}))
    if all(t.is_meta for t in tensors.values()):
        raise FullshardError(
            "broadcast has no effect: this model is on meta, where shard() gives all ranks the same values; leave it out"
        )
    for tensor in tensors.values():
        if not tensor.is_meta:
            _broadcast(tensor.detach(), ranks.group)
    ranks.close()


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Over host memory: a group may have no backend for the tensor's device."""
    values = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    dist.broadcast(values, src=0, group=group)
    tensor.copy_(values)


def _refuse_other_models(found: list[dict[str, tuple[tuple[int, ...], str, bool]]]) -> None:
    for rank, tensors in enumerate(found):
        differing = [n for n in {**found[0], **tensors} if tensors.get(n) != found[0].get(n)]
        if differing:
            here, first = _described(tensors.get(differing[0])), _described(found[0].get(differing[0]))
            raise FullshardError(
                f"{differing[0]} is {here} on rank {rank}, but {first} on rank 0; build the same model on every rank: "
                "broadcast=True changes its values alone"
            )


def _described(tensor: tuple[tuple[int, ...], str, bool] | None) -> str:
    if tensor is None:
        return "missing"
    shape, dtype, meta = tensor
    return f"{list(shape)} in {dtype.removeprefix('torch.')}{' on meta' if meta else ''}"
