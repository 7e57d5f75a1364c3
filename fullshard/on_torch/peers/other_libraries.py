"""Accelerate, DeepSpeed and Megatron-FSDP, each as its documentation sets it up, with everything sharded."""

import functools
from collections.abc import Callable

import torch

from fullshard.engine.bench_protocols import PeerRequest
from fullshard.on_torch.peers.peer import TorchPeer, block_classes, torch_optimizer, whole_model


def accelerate(request: PeerRequest) -> TorchPeer:
    """Accelerate with its FSDP2 plugin. On a CPU it has data parallelism alone, which is then what is measured."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    model, device = whole_model(request)
    on_gpu = device.type == "cuda"
    names = sorted(kind.__name__ for kind in block_classes(model, request.plan))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=names
    )
    compute = request.plan.precision.compute
    accelerator = Accelerator(
        fsdp_plugin=plugin if on_gpu else None, mixed_precision="no" if compute == "fp32" else compute, cpu=not on_gpu
    )
    wrapped, optimizer = accelerator.prepare(model, torch_optimizer(model, request.optimizer))

    def update() -> None:
        if request.clip is not None:
            accelerator.clip_grad_norm_(wrapped.parameters(), request.clip)
        optimizer.step()
        optimizer.zero_grad()

    return TorchPeer(wrapped, device, accelerator.backward, update, waiting=functools.partial(accelerator.no_sync, wrapped))


def deepspeed(request: PeerRequest) -> TorchPeer:
    """DeepSpeed's ZeRO-3, with the optimizer that it is given."""
    import deepspeed as library

    model, device = whole_model(request)
    batch = request.plan.batch
    config = {
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulate,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": request.plan.precision.compute == "bf16"},
        **({"gradient_clipping": request.clip} if request.clip is not None else {}),
    }
    optimizer = torch_optimizer(model, request.optimizer)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    count = batch.accumulate
    backward: Callable[[torch.Tensor], object] = lambda loss: (engine.backward(loss * count), engine.step())
    return TorchPeer(engine, device, backward, lambda: None)  # it divides by the micro-batches itself, and steps after the last


def megatron_fsdp(request: PeerRequest) -> TorchPeer:
    """Megatron-FSDP with parameters, gradients and optimizer state sharded."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

    model, device = whole_model(request)
    if request.plan.precision.compute == "bf16":
        model = model.to(torch.bfloat16)  # it keeps fp32 masters of its own
    wrapped = fully_shard_model(
        model,
        fsdp_unit_modules=list(block_classes(model, request.plan)),
        zero_dp_strategy="optim_grads_params",
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32),
        preproc_state_dict_for_dcp_ckpt=False,  # nothing is saved
    )
    optimizer = fully_shard_optimizer(torch_optimizer(wrapped, request.optimizer), preproc_state_dict_for_dcp_ckpt=False)

    def update() -> None:
        if request.clip is not None:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), request.clip)
        optimizer.step()
        optimizer.zero_grad()

    return TorchPeer(wrapped, device, torch.Tensor.backward, update)
