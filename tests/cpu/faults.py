"""Planted faults: each function breaks a run in one way and returns the sentence it is met with. Inside ranks."""

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard import FullshardError, on_torch
from tests.cpu import parity


def run(fault: str, *, micro_batch: int = 2, checks: bool = True) -> str:
    """The error of the first step, or `trained`."""
    model = parity.build("plain")
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), batch=fs.Batch(micro_batch, parity.LENGTH))
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), first_step_checks=checks)
    loss = PLANTED.get(fault, lambda state: None)(state) or on_torch.summed_loss
    rank = 0 if fault == "equal data" else dist.get_rank()
    ids = torch.randint(0, parity.VOCAB, (micro_batch, parity.LENGTH + 1), generator=torch.Generator().manual_seed(rank))
    try:
        for _ in range(2):
            on_torch.train_step(state, [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}], loss=loss)
    except FullshardError as error:
        return str(error)
    return "trained"


def leave_out(state, index: int) -> None:
    """Compute all blocks but one."""

    class Fewer(nn.ModuleList):
        def __iter__(self):
            return iter([layer for i, layer in enumerate(super().__iter__()) if i != index])

    state.model.model.layers.__class__ = Fewer


def detach(state) -> None:
    """Compute a block and do not train it."""
    state.model.model.layers[1].register_forward_hook(lambda module, given, output: given[0] + 0 * output.detach())


def _skip(index: int):
    """Rank 1 leaves a block out."""

    def plant(state) -> None:
        if dist.get_rank() == 1:
            leave_out(state, index)

    return plant


def _skip_by_own_sum(state):
    """In the forwards of the checks already, and for a loss that counts by itself."""
    _skip(1)(state)
    return _summed_loss_of_ones_own(state)


def _detach_on_one_rank(state) -> None:
    if dist.get_rank() == 1:
        detach(state)


def _replace_parameter(state) -> None:
    layer = state.model.model.layers[1].mlp.up_proj
    layer._parameters["weight"] = nn.Parameter(torch.randn(42, 24))


def _other_mesh(state) -> None:
    """Replicated where the plan shards."""
    from torch.distributed.tensor import DTensor, Replicate

    norm = state.model.model.norm
    mesh = norm.weight.device_mesh
    norm._parameters["weight"] = nn.Parameter(DTensor.from_local(torch.ones(24), mesh, [Replicate()]))


def _poison(state) -> None:
    with torch.no_grad():
        state.model.model.layers[2].mlp.down_proj.weight.to_local()[0, 0] = float("nan")


def _buffer_of_each_rank(state) -> None:
    state.model.register_buffer("table", torch.full((3,), float(dist.get_rank())))


def _stale_optimizer(state) -> None:
    """Built from clones, as when the model was sharded or moved after the optimizer was made."""
    state.optimizer = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in state.model.parameters()], lr=1e-3)


def _optimizer_of_more(state) -> None:
    state.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def _optimizer_that_does_nothing(state) -> None:
    state.optimizer.step = lambda: None


def _detach(state) -> None:
    """The last block's output is detached: nothing below it learns."""
    state.model.model.layers[2].register_forward_hook(lambda module, args, out: out.detach())


def _mean_loss(state):
    return lambda model, batch: on_torch.summed_loss(model, batch) / batch["labels"].numel()


def _summed_loss_of_ones_own(state):
    return lambda model, batch: 2 * on_torch.summed_loss(model, batch)


def _tiny_learning_rate(state) -> None:
    for group in state.optimizer.param_groups:
        group["lr"] = 1e-30
        group["weight_decay"] = 0.0


def _zero_learning_rate(state) -> None:
    for group in state.optimizer.param_groups:
        group["lr"] = 0.0


PLANTED = {
    "parameter replaced": _replace_parameter,
    "wrong sharding": _other_mesh,
    "uninitialised": _poison,
    "buffer differs": _buffer_of_each_rank,
    "stale optimizer": _stale_optimizer,
    "foreign parameters": _optimizer_of_more,
    "idle optimizer": _optimizer_that_does_nothing,
    "tiny learning rate": _tiny_learning_rate,
    "zero learning rate": _zero_learning_rate,
    "zero gradients": _detach,
    "skipped on one rank": _skip(1),
    "last skipped on one rank": _skip(2),
    "skipped by own loss": _skip_by_own_sum,
    "detached on one rank": _detach_on_one_rank,
    "mean loss": _mean_loss,
    "own sum": _summed_loss_of_ones_own,
}
