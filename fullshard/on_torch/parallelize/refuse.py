"""Refuse plans that this engine cannot carry out, naming the unit, before any memory is allocated."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fullshard.base.errors import FullshardError, nearest
from fullshard.on_torch.communication.quantized_collectives import refuse_wire
from fullshard.on_torch.model.tied_parameters import parameter_names
from fullshard.on_torch.offload.activations.offloaded_activations import refuse_activations
from fullshard.on_torch.offload.units.offloaded_unit import is_offloaded
from fullshard.on_torch.optimizers.adam_update import rule_of
from fullshard.on_torch.parallelize.experts import refuse_expert_axis
from fullshard.on_torch.parallelize.float8 import refuse_float8
from fullshard.on_torch.parallelize.tensor_parallel import refuse_tensor_axis
from fullshard.plan.optimizer import Adam, Optimizer
from fullshard.plan.plan import Plan, Unit


def refuse(
    model: nn.Module,
    plan: Plan,
    optimizer: Optimizer | None = None,
    disk: str | Path | None = None,
    cpu_share: float | None = None,
) -> None:
    """Raise a `FullshardError` unless `plan` can be carried out on `model`."""
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise FullshardError("this model is already sharded; build it again (on meta, which costs nothing) and shard that")
    paths = [path for path, _ in model.named_modules()]
    for unit in plan.units:
        _refuse_unknown_modules(unit, paths)
        _refuse_remat(unit, plan)
    _refuse_buffers(model, plan)
    _refuse_homes(plan, optimizer, disk)
    _refuse_low_bit(plan, optimizer)
    if plan.kernels.update != "auto" and not isinstance(optimizer, Adam):
        raise FullshardError(
            f"kernels.update = {plan.kernels.update!r} is for Adam and AdamW; leave it out, or train with one of them"
        )
    _refuse_share(plan, cpu_share)
    _refuse_parameters(model, plan)
    refuse_activations(model, plan)
    refuse_tensor_axis(model, plan)
    refuse_expert_axis(model, plan)
    refuse_wire(plan.wire)
    refuse_float8(model, plan)
    if plan.compile and not any(
        len(u.modules) == 1 and u.modules[0] and any(model.get_submodule(u.modules[0]).children()) for u in plan.units
    ):
        raise FullshardError("compile = true has no effect: no unit of this plan is a single block; set compile = false")


def refuse_device(device: str | None) -> None:
    """Raise for a device type that is unknown or not available."""
    if device not in (None, "cpu", "cuda"):
        raise FullshardError(
            f"shard: device = {device!r} is unknown; write 'cuda' or 'cpu' without an index: each rank takes its own GPU"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise FullshardError(
            "shard: device = 'cuda', but this process sees no GPU that torch can use; leave it out, or write 'cpu'"
        )


def _refuse_unknown_modules(unit: Unit, paths: list[str]) -> None:
    for path in unit.modules:
        if path not in paths:
            raise FullshardError(
                f"unit {unit.name}: this model has no module {path!r}{nearest(path, paths)} "
                "(the plan was made for another model; describe this one and plan again)"
            )


def _refuse_homes(plan: Plan, optimizer: Optimizer | None, disk: str | Path | None) -> None:
    for unit in plan.units:
        if unit.home.params == "disk" and unit.home.optimizer == "device":
            raise FullshardError(
                f"unit {unit.name}: home.params = 'disk' saves nothing while the optimizer's own copy of them is on the device;"
                " write home.optimizer = 'disk' or 'host'"
            )
        if not is_offloaded(unit):
            continue
        if optimizer is None:
            raise FullshardError(
                f"unit {unit.name}: its home is {unit.home}, where the optimizer keeps the master copy; pass an optimizer"
            )
        rule_of(optimizer)
    kinds = ("params", "optimizer", "activations")
    on_disk = [(u.name, kind) for u in plan.units for kind in kinds if getattr(u.home, kind) == "disk"]
    if on_disk and disk is None:
        name, kind = on_disk[0]
        raise FullshardError(f"unit {name}: home.{kind} = 'disk' needs a directory; pass disk=, or disk.path in a recipe")
    if disk is not None and not on_disk:
        raise FullshardError("disk has no effect: no unit of the plan has a home on disk; leave it out")
    if disk is not None and not Path(disk).is_dir():
        raise FullshardError(f"{disk} is not a directory; make it first, on the disk that the plan is to use")


def _refuse_low_bit(plan: Plan, optimizer: Optimizer | None) -> None:
    if plan.precision.low_bit and optimizer is not None and not isinstance(optimizer, Adam):
        raise FullshardError(
            f"precision ({plan.precision}): moments in few bits and stochastic rounding are for Adam and AdamW; use one of them, "
            "or leave precision.moments and precision.rounding out"
        )


def _refuse_buffers(model: nn.Module, plan: Plan) -> None:
    """Refuse a buffer dtype without floating-point buffers, and one that would round running statistics."""
    kind = plan.precision.buffers
    if kind is None:
        return
    if not any(b.is_floating_point() for b in model.buffers()):
        raise FullshardError(
            f"precision.buffers = {kind!r} has no effect: this model has no floating-point buffers; leave it out"
        )
    for path, module in model.named_modules():
        if kind != "fp32" and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            raise FullshardError(f"precision.buffers = {kind!r}: the running statistics of {path} need fp32; leave it out")


def _refuse_share(plan: Plan, cpu_share: float | None) -> None:
    if cpu_share is None:
        return
    if plan.cpu_share is not None:
        raise FullshardError(
            f"cpu_share = {cpu_share:g} is given, but the plan has its own, {plan.cpu_share:g}; leave one of them out"
        )
    if not any(is_offloaded(u) for u in plan.units):
        raise FullshardError(
            "cpu_share has no effect: this plan keeps all parameters and optimizer state on the device; leave it out"
        )


def _refuse_remat(unit: Unit, plan: Plan) -> None:
    inner = [u.name for u in plan.units if u is not unit and _inside(u, unit)]
    if unit.remat == "selective" and inner:
        raise FullshardError(
            f"unit {unit.name}: remat = 'selective' cannot be carried out around another unit ({inner[0]}); "
            "write 'full', or group by block"
        )
    if unit.remat != "none" and "" in unit.modules:
        raise FullshardError(
            f"unit {unit.name}: remat = {unit.remat!r} would recompute the whole model; set it on the blocks instead"
        )
    if "" in unit.modules and len(unit.modules) > 1:
        raise FullshardError(f"unit {unit.name}: the root ('') holds every module already; give it a unit of its own")


def _inside(inner: Unit, outer: Unit) -> bool:
    return any(m.startswith(f"{p}.") for m in inner.modules for p in outer.modules if p)


def _refuse_parameters(model: nn.Module, plan: Plan) -> None:
    names = parameter_names(model)
    for name, p in model.named_parameters():
        owners = {u.name: n for n in names[id(p)] if (u := plan.unit_of(n)) is not None}
        if not owners:
            raise FullshardError(
                f"parameter {name} is in no unit of the plan; describe this model and plan again, or add a root unit"
            )
        if len(owners) > 1:
            raise FullshardError(
                f"units {' and '.join(owners)}: {' and '.join(owners.values())} are one tied parameter; "
                "put their modules into one unit"
            )
        _refuse_parameter(name, p, next(iter(owners)), plan.mesh.tensor)


def _refuse_parameter(name: str, p: nn.Parameter, unit: str, tensor: int) -> None:
    if not p.is_floating_point():
        raise FullshardError(f"unit {unit}: {name} is {str(p.dtype)[6:]}; only floating-point parameters can be sharded")
    if p.ndim == 0 and tensor > 1:
        raise FullshardError(f"unit {unit}: {name} is a scalar, which mesh.tensor = {tensor} does not take; use tensor = 1")
    if p.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise FullshardError(f"unit {unit}: {name} is {str(p.dtype)[6:]}; use a model with bf16 or fp32 parameters")
