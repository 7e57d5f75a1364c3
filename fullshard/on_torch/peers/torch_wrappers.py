"""Torch's own three: bare `fully_shard`, DistributedDataParallel, and FullyShardedDataParallel (FSDP1)."""

import functools
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from fullshard.engine.bench_protocols import PeerRequest
from fullshard.on_torch.model.initialize import materialize
from fullshard.on_torch.parallelize.shard import modules_of
from fullshard.on_torch.peers.peer import TorchPeer, autocast, block_classes, prepare_blocks, torch_optimizer, whole_model
from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES


def bare_fully_shard(request: PeerRequest) -> TorchPeer:
    """FSDP2 as in torch's documentation: `fully_shard` on every block, then on the root."""
    model, device = prepare_blocks(request)
    precision, mesh = request.plan.precision, init_device_mesh(device.type, (dist.get_world_size(),))
    mixed = precision.compute != "fp32"
    policy = MixedPrecisionPolicy(PLAN_DTYPES[precision.compute], PLAN_DTYPES[precision.reduce]) if mixed else None
    options = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy(), "reshard_after_forward": True}
    for unit in sorted(request.plan.units, key=lambda u: -max(path.count(".") for path in u.modules)):
        modules = modules_of(model, unit)
        fully_shard(modules if len(modules) > 1 else modules[0], **options)  # type: ignore[call-overload]
    if not isinstance(model, FSDPModule):
        fully_shard(model, **options)  # type: ignore[call-overload]
    materialize(model, [list(u.modules) for u in request.plan.units], device, request.seed)
    return TorchPeer(model, device, torch.Tensor.backward, stepping(model, request))


def data_parallel(request: PeerRequest) -> TorchPeer:
    """DDP: everything whole on every rank; bf16 through autocast."""
    model, device = whole_model(request)
    ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    update = stepping(model, request)
    return TorchPeer(wrapped, device, torch.Tensor.backward, update, autocast(request, device), wrapped.no_sync)


def fsdp1(request: PeerRequest) -> TorchPeer:
    """FSDP1 with FULL_SHARD, each block wrapped, and parameters in their original shapes."""
    model, device = whole_model(request)
    precision = request.plan.precision
    mixed = MixedPrecision(param_dtype=PLAN_DTYPES[precision.compute], reduce_dtype=PLAN_DTYPES[precision.reduce])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 says that it is deprecated
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(block_classes(model, request.plan)),
            mixed_precision=mixed if precision.compute != "fp32" else None,
            device_id=device if device.type == "cuda" else torch.device("cpu"),
            use_orig_params=True,
        )
    optimizer = torch_optimizer(wrapped, request.optimizer)

    def update() -> None:
        if request.clip is not None:
            wrapped.clip_grad_norm_(request.clip)
        optimizer.step()
        optimizer.zero_grad()

    return TorchPeer(wrapped, device, torch.Tensor.backward, update)


def stepping(model: nn.Module, request: PeerRequest) -> Callable[[], None]:
    """Clip, step and clear the gradients, with torch's own functions."""
    return functools.partial(_update, model, torch_optimizer(model, request.optimizer), request.clip)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
