"""The expert axis: the experts of a mixture spread over ranks, and tokens sent to their experts and back by all-to-all.

A module holds experts if all its own parameters have one row for each of its `num_experts`, and its forward takes hidden
states, the chosen experts and their weights, as the mixtures of Hugging Face do. On a rank it holds `num_experts` divided by
the axis, and its forward is called with the tokens of all ranks that chose one of them.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard.base.errors import FullshardError, nearest
from fullshard.on_torch.model.borrowed_parameters import borrowed_parameters
from fullshard.on_torch.private.torch_internals import all_to_all
from fullshard.on_torch.ranks.device_meshes import Meshes
from fullshard.plan.plan import Plan


def expert_modules(model: nn.Module) -> dict[str, int]:
    """The paths of the modules that hold experts, with their numbers of experts."""
    found = {path: expert_count(module) for path, module in model.named_modules()}
    return {path: count for path, count in found.items() if count}


def expert_count(module: nn.Module) -> int:
    """The number of experts whose parameters a module holds; 0 if it holds none."""
    count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(count, int) or not own or any(p.shape[:1] != (count,) for p in own):
        return 0
    inputs = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return count if len(inputs) >= 3 else 0  # a router has such parameters too, and takes hidden states alone


def refuse_expert_axis(model: nn.Module, plan: Plan) -> None:
    """Raise, before anything is changed, if a unit's experts cannot be spread over the plan's expert axis."""
    paths = [(unit.name, path) for unit in plan.units if unit.layout == "experts" for path in unit.modules]
    known = expert_modules(model) if paths else {}
    for name, path in paths:
        if path not in known:
            raise FullshardError(
                f"unit {name}: layout = 'experts', but {path} holds no experts{nearest(path, list(known))} "
                f"(the model has {', '.join(list(known)[:3]) or 'none'})"
            )
    refuse_uneven_experts(model, [path for _, path in paths], plan.mesh.expert)


def refuse_uneven_experts(model: nn.Module, paths: list[str], expert: int) -> None:
    """Raise if the ranks of an expert axis cannot have equal numbers of experts."""
    for path in paths:
        if (count := expert_count(model.get_submodule(path))) % expert:
            raise FullshardError(
                f"{path} has {count} experts, which mesh.expert = {expert} does not divide; use an axis that does"
            )


def apply_expert_axis(model: nn.Module, plan: Plan, meshes: Meshes) -> None:
    """Spread the experts of every unit with layout `experts`."""
    for unit in plan.units:
        for path in unit.modules if unit.layout == "experts" else ():
            spread_experts(model.get_submodule(path), meshes.expert())


def spread_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of the axis its experts, and the module a forward that sends tokens to them."""
    for name, p in list(module._parameters.items()):
        if p is not None:
            spread = distribute_tensor(p.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(spread, requires_grad=p.requires_grad))
    experts = module.num_experts
    assert isinstance(experts, int)
    module.num_experts = experts // mesh.size()  # type: ignore[assignment]
    module.forward = _SpreadForward(module, module.forward, experts, mesh)


class _SpreadForward:
    """The forward of a module with spread experts."""

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], experts: int, mesh: DeviceMesh):
        self.module, self.forward, self.experts, self.mesh = module, forward, experts, mesh

    def __call__(self, hidden_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Every token goes to the ranks of its experts, and comes back as the weighted sum of what they made of it."""
        tokens, choices = chosen_NK.shape
        order = chosen_NK.flatten().argsort(stable=True)
        sent_E = torch.bincount(chosen_NK.flatten(), minlength=self.experts)
        received_RL = all_to_all(sent_E, self.mesh).view(self.mesh.size(), -1)  # from each rank, for each expert here
        going, coming = _integers(sent_E.view(self.mesh.size(), -1).sum(1)), _integers(received_RL.sum(1))
        # Every row is copied before it is sorted: the gradient of a permutation is exact in any order of addition.
        copies = hidden_ND.unsqueeze(1).expand(-1, choices, -1).reshape(tokens * choices, -1)
        arrived_MD = all_to_all(copies.index_select(0, order), self.mesh, coming, going)
        here = torch.arange(received_RL.shape[1], device=order.device).repeat(self.mesh.size())
        made_MD = self._experts(arrived_MD, torch.repeat_interleave(here, received_RL.flatten(), output_size=sum(coming)))
        returned_SD = all_to_all(made_MD, self.mesh, going, coming).index_select(0, order.argsort())
        return (returned_SD.view(tokens, choices, -1) * weights_NK.unsqueeze(-1)).sum(1).to(hidden_ND.dtype)

    def _experts(self, arrived_MD: Tensor, expert_M: Tensor) -> Tensor:
        """The module's own forward, each row with one expert."""
        local = {n: _local_experts(p, self.mesh.size()) for n, p in self.module._parameters.items() if p is not None}
        with borrowed_parameters(self.module, local):
            made = self.forward(arrived_MD, expert_M.unsqueeze(1), arrived_MD.new_ones(len(arrived_MD), 1))
        if not len(arrived_MD):  # nobody chose an expert of this rank: it still takes part in the reduction of gradients
            made = made + sum(p.flatten()[0] for p in local.values()) * 0.0
        return made


class _ShareOfGradient(torch.autograd.Function):
    """Identity whose gradient is divided: the tokens of all ranks of the axis add up in an expert's gradient, and FSDP averages
    over the other ranks alone."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.ranks, None


def _local_experts(p: Tensor, ranks: int) -> Tensor:
    local = p.to_local() if isinstance(p, DTensor) else p
    return _ShareOfGradient.apply(local, ranks) if local.requires_grad else local


def _integers(counts: Tensor) -> list[int]:
    return [int(n) for n in counts.unbind()] if counts.is_meta else counts.tolist()
