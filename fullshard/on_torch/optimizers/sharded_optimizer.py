"""Optimizers over sharded parameters, and the global gradient norm."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.base.errors import FullshardError, a_kind, nearest
from fullshard.on_torch.optimizers.adam_update import rule_of
from fullshard.on_torch.optimizers.low_bit_adam import make_low_bit_adam
from fullshard.on_torch.optimizers.low_bit_update import LowBitRule
from fullshard.on_torch.optimizers.one_pass_adam import OnePassAdam, find_one_pass, one_pass
from fullshard.on_torch.private.torch_internals import sharded_dim
from fullshard.on_torch.ranks.device_meshes import all_reduce_sum
from fullshard.on_torch.tensors.shard_ranges import local_tensor
from fullshard.plan.optimizer import SGD, Adam, AdamW, Optimizer, TorchOptimizer
from fullshard.plan.plan import Precision


def make_optimizer(
    model: nn.Module,
    spec: Optimizer,
    precision: Precision | None = None,
    *,
    own_kernels: bool = True,
    offloaded: Iterable[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Build torch's optimizer for `spec` over the trainable parameters. `precision`: of its moments and updates. `own_kernels`:
    whether it may update by fullshard's. `offloaded`: parameters that it never updates itself.

    Parameters on different meshes are in different groups, because a fused kernel takes tensors of one mesh only.
    """
    grouped: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            grouped.setdefault((mesh, spec.decay_all or p.ndim > 1), []).append(p)
    groups = [{"params": params} | ({} if decays else {"weight_decay": 0.0}) for (_, decays), params in grouped.items()]
    if isinstance(spec, SGD):
        # DTensor has no rule for the fused SGD kernel.
        return torch.optim.SGD(
            groups, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay, nesterov=spec.nesterov, foreach=True
        )
    if isinstance(spec, TorchOptimizer):
        return named_optimizer(spec, groups)
    kind: Any = torch.optim.AdamW if isinstance(spec, AdamW) else torch.optim.Adam
    settings: dict[str, Any] = {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps, "weight_decay": spec.weight_decay}
    if precision is not None and (how := LowBitRule.of(precision, rule_of(spec))) is not None:
        return make_low_bit_adam(kind, how, {id(p): n for n, p in model.named_parameters()}, groups, **settings)
    elsewhere = {id(p) for p in offloaded}
    resident = [p for found in grouped.values() for p in found if id(p) not in elsewhere]
    kind = one_pass(kind) if own_kernels and _fits_one_pass(kind, resident) else kind
    return kind(groups, fused=True, **settings)


def _fits_one_pass(kind: type, parameters: list[nn.Parameter]) -> bool:
    """True if all parameters are fp32 on a GPU whose kernel gives torch's results."""
    if not parameters or not all(p.is_cuda and p.dtype is torch.float32 for p in parameters):
        return False
    return find_one_pass(kind.__name__.lower())[0] is not None


UNFIT = {"LBFGS": "it evaluates the loss several times a step", "SparseAdam": "it is for sparse gradients"}
UNFIT |= dict.fromkeys(("Muon", "Adafactor"), "it works on whole matrices, and a rank holds a part of each")
UNFIT["Rprop"] = "it writes through masks, which torch cannot do on shards"


def refuse_optimizer(spec: Optimizer | None) -> None:
    """Raise if torch has no such optimizer, or it does not take these options."""
    if spec is not None and not isinstance(spec, Adam | SGD | TorchOptimizer):
        raise FullshardError(
            "optimizer must be a fullshard.AdamW, Adam, SGD or TorchOptimizer (it is built after sharding), "
            f"not {a_kind(spec)}; for one of your own, leave it out, and write state.optimizer = yours after shard()"
        )
    if isinstance(spec, TorchOptimizer):
        named_optimizer(spec, [{"params": [nn.Parameter(torch.zeros(1))]}])


def refuse_nothing_to_train(model: nn.Module, spec: Optimizer | None) -> None:
    if spec is not None and not any(p.requires_grad for p in model.parameters()):
        raise FullshardError(
            "every parameter of this model is frozen (requires_grad is False), so that the optimizer has nothing to train; "
            "unfreeze what is to be trained, or call shard() without an optimizer"
        )


def named_optimizer(spec: TorchOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build an optimizer of `torch.optim` by its name."""
    known = [n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]
    names = {n.lower(): n for n in known if n not in ("Optimizer", *UNFIT)}
    for unfit, why in UNFIT.items():
        if spec.name.lower() == unfit.lower():
            raise FullshardError(f"torch.optim.{unfit} cannot train shards: {why}; use AdamW")
    if spec.name.lower() not in names:
        raise FullshardError(
            f"torch.optim has no optimizer {spec.name!r} (it has {', '.join(names.values())}){nearest(spec.name, list(names))}"
        )
    try:
        made: torch.optim.Optimizer = getattr(torch.optim, names[spec.name.lower()])(groups, lr=spec.lr, **dict(spec.options))
    except (TypeError, ValueError) as error:
        raise FullshardError(f"torch.optim.{names[spec.name.lower()]}: {str(error).splitlines()[0]}") from None
    return made


def step_unless(
    skip: Tensor, optimizer: torch.optim.Optimizer, parts: dict[int, list[Tensor]], factors: Sequence[Tensor] = ()
) -> None:
    """Multiply the gradients `parts` by the factors, one after the other, and step the optimizer, unless `skip` is true. Fused
    kernels read `skip` on the device; for others the host waits."""
    if isinstance(optimizer, OnePassAdam):
        optimizer.grad_factors = torch.stack([f.float() for f in factors]) if factors else None
    else:
        for factor in factors:
            scale(parts, factor)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]  # it would also skip the caller's next own step
    elif not bool(skip):
        optimizer.step()


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, such as the learning rate, without the parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def set_group_settings(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    """The inverse of `group_settings`."""
    if len(settings) != len(optimizer.param_groups):
        raise FullshardError(
            f"the optimizer had {len(settings)} parameter groups, and has {len(optimizer.param_groups)} now; use the same plan"
        )
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        group.update(saved)


def makes_state(optimizer: torch.optim.Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """True for the step with which DCP creates an optimizer's state: `step(closure=None)` with zero gradients and a learning
    rate of 0. It must not count as a training step."""
    return "closure" in kwargs and all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)


def gradients(parameters: Iterable[nn.Parameter]) -> dict[int, list[Tensor]]:
    """This rank's parts of the gradients, keyed by the number of ranks that have the same part."""
    parts: dict[int, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            parts.setdefault(replicas_of(p.grad), []).append(local_tensor(p.grad))
    return parts


def replicas_of(tensor: Tensor) -> int:
    """The number of ranks that have the same part of a tensor as this rank."""
    return torch.distributed.get_world_size() // _shards(tensor)


def _shards(tensor: Tensor) -> int:
    """The number of different parts that a tensor is split into."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(tensor.placements):
        if sharded_dim(placement) is not None:
            count *= tensor.device_mesh.size(axis)
    return count


def square_norm(parts: dict[int, list[Tensor]], device: torch.device) -> Tensor:
    """This rank's share of the squared global norm. The sum over all ranks is the squared norm, on any mesh."""
    shares = [sum_of_squares(local_norms(tensors)) / copies for copies, tensors in parts.items()]
    return torch.stack(shares).sum() if shares else _zero(device)


def sum_of_squares(norms: list[Tensor]) -> Tensor:
    """In double precision, so that the order, which differs between homes, does not change what gradients are clipped by."""
    return torch.stack(norms).double().square().sum()


def local_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each tensor, in fp32 at least: in 16 bits, three digits would be left of it."""
    by_dtype: dict[torch.dtype, list[int]] = {}  # a foreach kernel takes tensors of one dtype
    for i, t in enumerate(tensors):
        by_dtype.setdefault(t.dtype, []).append(i)
    found = list(tensors)
    for dtype, places in by_dtype.items():
        wide = torch.float32 if dtype.itemsize == 2 else None
        for i, norm in zip(places, torch._foreach_norm([tensors[i] for i in places], 2.0, wide), strict=True):
            found[i] = norm
    return found


def global_norm(parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients, equal to that of the unsharded model. `norm_type`: any above 0, or `inf`. Collective."""
    kind = _norm_type(norm_type)
    found = list(parameters)
    if not found:
        raise FullshardError("the gradient norm of no parameters; pass state.parameters()")
    parts = gradients(found)
    if kind == 2.0:
        return all_reduce_sum(square_norm(parts, found[0].device)).sqrt()
    shares = [_power_sum(t, kind) / (1 if kind == math.inf else copies) for copies, ts in parts.items() for t in ts if t.numel()]
    if kind == math.inf:
        largest = torch.stack(shares).max() if shares else _zero(found[0].device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest
    return all_reduce_sum(torch.stack(shares).sum() if shares else _zero(found[0].device)) ** (1 / kind)


def _norm_type(given: float | str) -> float:
    try:
        kind = float(given)
    except (TypeError, ValueError):
        kind = math.nan
    if not kind > 0:
        raise FullshardError(f"norm_type must be a number above 0 or inf, not {given!r}; 2.0 is the usual norm")
    return kind


def _power_sum(part: Tensor, kind: float) -> Tensor:
    """The sum of the elements' magnitudes to the power `kind`; the largest magnitude for `inf`. In double precision."""
    norm = torch.linalg.vector_norm(part, kind, dtype=torch.float32 if part.dtype.itemsize == 2 else None).double()
    return norm if kind == math.inf else norm**kind


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def clip_grad_norm_(
    parameters: nn.Parameter | Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients down to the norm `max_norm`, in place; return the norm that they had. Collective.

    As torch's function of that name, for any mixture of layouts. `foreach` has no effect.
    """
    found: list[nn.Parameter] = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    norm = global_norm(found, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradients' norm of type {norm_type} is {float(norm)}, so they cannot be clipped; pass error_if_nonfinite=False"
        )
    scale(gradients(found), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def scale(parts: dict[int, list[Tensor]], factor: Tensor) -> None:
    """Multiply the gradients in place."""
    for tensors in parts.values():
        torch._foreach_mul_(tensors, factor.to(tensors[0].dtype))
