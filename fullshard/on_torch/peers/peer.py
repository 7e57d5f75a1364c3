"""What all peers share: the same model, data, loss, optimizer and precision, and one loop of micro-batches."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.base.errors import FullshardError
from fullshard.engine.bench_protocols import CountedCollective, PeerRequest
from fullshard.on_torch.communication.collective_log import record
from fullshard.on_torch.loss.losses import IGNORED
from fullshard.on_torch.model.initialize import initialize
from fullshard.on_torch.optimizers.sharded_optimizer import make_optimizer
from fullshard.on_torch.parallelize.shard import apply_remat_and_compile, compiled_modules
from fullshard.on_torch.ranks.device_meshes import start
from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan

Context = Callable[[], AbstractContextManager[Any]]


def torch_optimizer(model: nn.Module, spec: Optimizer) -> torch.optim.Optimizer:
    """The optimizer as torch has it, without fullshard's kernels."""
    return make_optimizer(model, spec, own_kernels=False)


@dataclass
class TorchPeer:
    """A model that another system trains. `backward`: of a loss. `update`: clips, steps and clears the gradients. `compute`: a
    context around forward. `waiting`: a context around all micro-batches but the last, in which gradients are not reduced."""

    model: Callable[..., Any]
    device: torch.device
    backward: Callable[[Tensor], object]
    update: Callable[[], object]
    compute: Context = nullcontext
    waiting: Context = nullcontext

    def step(self, micro_batches: Sequence[Any]) -> float:
        total = 0.0
        for i, batch in enumerate(micro_batches):
            with self.waiting() if i + 1 < len(micro_batches) else nullcontext():
                loss = self._loss(batch) / len(micro_batches)
                self.backward(loss)
            total += loss.detach()  # type: ignore[assignment]
        self.update()
        return float(total)  # waits for the device

    def _loss(self, batch: Any) -> Tensor:
        """The mean cross-entropy, as these systems' own examples compute it."""
        ids, labels = (torch.as_tensor(batch[key]).to(self.device, non_blocking=True) for key in ("input_ids", "labels"))
        with self.compute():
            found = self.model(ids)
            logits = found if isinstance(found, Tensor) else found.logits
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)

    def collectives(self, micro_batches: Sequence[Any]) -> list[CountedCollective]:
        return counted(lambda: self.step(micro_batches))

    def reset_peak(self) -> None:
        reset_peak(self.device)

    def memory(self) -> dict[str, int]:
        return peak_bytes(self.device)


def counted(step: Callable[[], object]) -> list[CountedCollective]:
    """The collectives that a step issues on this rank."""
    with record() as traffic:
        step()
    return [CountedCollective(c.kind, c.nbytes, c.ranks) for c in traffic.collectives]


def reset_peak(device: torch.device) -> None:
    """Give cached memory back to the device, and count its peak anew."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> dict[str, int]:
    """The allocator's peak since `reset_peak`. A CPU's keeps no count."""
    if device.type != "cuda":
        return {}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


# -- building --------------------------------------------------------------------------------------------------


def prepare_blocks(request: PeerRequest) -> tuple[nn.Module, torch.device]:
    """The model on meta with remat and compile applied to its blocks as in the plan, and this rank's device."""
    device, model, plan = start(), request.model, request.plan
    if plan.precision.compute == "fp16":
        raise FullshardError("peers are measured in fp32 and bf16; write compute=bf16")
    if hasattr(model, "config"):
        model.config.use_cache = False  # a Hugging Face model would keep keys and values for generation
    apply_remat_and_compile(model, plan)
    return model, device


def whole_model(request: PeerRequest) -> tuple[nn.Module, torch.device]:
    """The model with its drawn weights, whole on this rank's device."""
    model, device = prepare_blocks(request)
    initialize(model, device, request.seed)
    return model, device


def block_classes(model: nn.Module, plan: Plan) -> set[type[nn.Module]]:
    """The classes of the repeated blocks."""
    return {type(m) for m in compiled_modules(model, plan)} - {type(model)}


def autocast(request: PeerRequest, device: torch.device) -> Context:
    """Autocast to the compute dtype, for systems that keep fp32 parameters; nothing for fp32."""
    dtype = PLAN_DTYPES[request.plan.precision.compute]
    if dtype is torch.float32:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype)
