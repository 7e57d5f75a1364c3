"""From a plain model and a plan to a sharded one.

`shard` reads as the order in which it happens: refuse, mesh, tensor axis, expert axis, float8, remat, compile, FSDP, wire,
homes, initialise, float8 gathers, optimizer.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fullshard.base.errors import checked_call
from fullshard.base.status import tell
from fullshard.on_torch.communication.collective_memory import refuse_memory, use_memory
from fullshard.on_torch.communication.quantized_collectives import quantize_collectives
from fullshard.on_torch.communication.replaced_collectives import (
    Collectives,
    MakeCommunication,
    install_communication,
    make_communication,
)
from fullshard.on_torch.loss.chunked_loss import compute_by_torch
from fullshard.on_torch.model.batch_norm import compute_in_fp32
from fullshard.on_torch.model.factory import Factory
from fullshard.on_torch.model.hf_files import saved_rules
from fullshard.on_torch.model.initialize import Initializer, factory_of, materialize
from fullshard.on_torch.model.model_copies import refuse_deepcopies
from fullshard.on_torch.model.scalars import make_vectors, scalar_names
from fullshard.on_torch.model.weights import Weights
from fullshard.on_torch.offload.activations.activation_hooks import spill_activations
from fullshard.on_torch.offload.optimizer_hooks import hook_optimizer
from fullshard.on_torch.offload.state_dict_hooks import hook_model
from fullshard.on_torch.offload.stores.offload_memory import OffloadMemory, make_memory
from fullshard.on_torch.offload.tiered_optimizer import TieredOptimizer
from fullshard.on_torch.offload.units.weak_hooks import weakly
from fullshard.on_torch.offload.updates.cpu_share import measured_share
from fullshard.on_torch.optimizers.sharded_optimizer import make_optimizer, refuse_nothing_to_train, refuse_optimizer
from fullshard.on_torch.parallelize.attention_backend import refuse_kernels, use_backend
from fullshard.on_torch.parallelize.experts import apply_expert_axis
from fullshard.on_torch.parallelize.float8 import (
    apply_float8,
    compile_options,
    float8_gathers,
    gather_in_float8,
    refuse_float8_device,
)
from fullshard.on_torch.parallelize.forward_errors import early_notes, explain_forward
from fullshard.on_torch.parallelize.lockstep_generate import lockstep_generate
from fullshard.on_torch.parallelize.refuse import refuse, refuse_device
from fullshard.on_torch.parallelize.remat import apply_remat, keep_products_by
from fullshard.on_torch.parallelize.same_work import SameWork
from fullshard.on_torch.parallelize.save_pretrained import save_together
from fullshard.on_torch.parallelize.start_checks import check_values_agree, refuse_unset_anywhere, remember_random_frozen
from fullshard.on_torch.parallelize.state import LossScale, State
from fullshard.on_torch.parallelize.tensor_parallel import apply_tensor_axis
from fullshard.on_torch.private.backward_gathers import gather_for_each_backward
from fullshard.on_torch.private.fsdp_groups import ComputedGradients, Owner, forget_unfinished, gather_group
from fullshard.on_torch.ranks.broadcast import broadcast_values
from fullshard.on_torch.ranks.device_meshes import Meshes, is_first, make_meshes, start
from fullshard.on_torch.ranks.device_presets import known_device
from fullshard.on_torch.ranks.unit_log import LOG, gather_groups, log_units
from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan, Unit
from fullshard.planner.device_limits import slow_precision

CALL = "shard(model, plan, optimizer=fullshard.AdamW(lr=1e-3))"


@checked_call(CALL, model=nn.Module, plan=Plan, device=(str, NoneType), broadcast=bool)
def shard(
    model: nn.Module,
    plan: Plan,
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    init: Initializer | Factory | None = None,
    weights: str | Path | None = None,
    device: str | None = None,
    first_step_checks: bool = True,
    disk: str | Path | None = None,
    cpu_share: float | None = None,
    communication: MakeCommunication | None = None,
    broadcast: bool = False,
) -> State:
    """Carry `plan` out on `model`, in place. Collective: every rank calls it.

    Parameters on the meta device are initialised from `seed`, shard by shard, or read from `weights`, a directory of
    safetensors files. `init`: a function of a module that sets its tensors, or a `Factory`. Parameters that have values keep
    them. A plan that this engine cannot carry out is refused before any memory is allocated. `disk`: a directory for what the
    plan puts on disk. `cpu_share`: the share of offloaded updates that the CPU does, if the plan leaves it open; measured by
    default. `communication`: makes the `Communication` of each sharded unit of the plan, in place of FSDP's own collectives; may
    be a subclass of it. `broadcast`: values that ranks have already are those of rank 0, as DDP does it.
    """
    where, own_collectives = _refuse_first(model, plan, optimizer, device, disk, cpu_share, communication)
    source = Weights(model, weights) if weights is not None else None
    files, scalars = [rule.to_json() for rule in saved_rules(model)], scalar_names(model)  # before FSDP renames its class
    meshes = make_meshes(plan, where.type)
    if broadcast:
        broadcast_values(model)
    check_values_agree(model)
    owners = make_vectors(model)
    gathers, notes = _shape_modules(model, plan, where, meshes)
    activations = spill_activations(model, plan, where, keep_products_by, disk)
    units = _apply_fsdp(model, plan, meshes, owners)
    _set_prefetch(plan, units)
    computed = _copy_whole_shards_once(plan, units)
    use_memory(plan, units)
    meter = quantize_collectives(plan, units)
    install_communication(own_collectives, units)
    memory = make_memory(model, plan, units, where, optimizer, disk, cpu_share, measured_share)
    drawn = [] if factory_of(model, init) else frozen_on_meta(model, source)
    paths, elsewhere = [list(u.modules) for u in plan.units], memory.initial_values() if memory else {}
    initialized = materialize(model, paths, where, seed, init, source, elsewhere)
    refuse_unset_anywhere(initialized.unset)
    if plan.precision.buffers:
        _cast_buffers(model, PLAN_DTYPES[plan.precision.buffers])
    scales = gather_in_float8(model, gathers, meshes)
    explain_forward(model, plan)
    lockstep_generate(model)
    refuse_deepcopies(model)
    if memory:
        memory.install(model)
    scale = LossScale() if plan.precision.compute == "fp16" else None
    made, offload = _make_optimizers(model, plan, where, optimizer, memory)
    ended = log_units(gather_groups(units), meshes.data("sharded").get_group("shard"), where)
    state = State(model, plan, meshes, where, made, loss_scale=scale, unit_modules=units, checks=first_step_checks)
    if offload is not None and made is not None:  # after the state's own hooks, which refuse before anything is handed over
        hook_optimizer(offload, made)
        hook_model(offload, model)
    state.wire_meter, state.computed_gradients = meter, computed
    state.activations, state.offload, state.float8 = activations, offload, scales
    state.files, state.scalars = files, scalars
    state.notes = (*notes, *initialized.notes, *early_notes(model, plan))
    _follow_copies(state, ended)
    if (slow := slow_precision(plan.precision, known_device(where))) and is_first():
        tell(slow)
    remember_random_frozen(state, drawn)
    save_together(state)
    return state


def _refuse_first(
    model: nn.Module,
    plan: Plan,
    optimizer: Optimizer | None,
    device: str | None,
    disk: str | Path | None,
    cpu_share: float | None,
    communication: MakeCommunication | None,
) -> tuple[torch.device, Collectives]:
    """Raise where the plan cannot be carried out, before any memory is allocated. Returns this rank's device, and collectives of
    the caller's own by unit."""
    refuse_device(device)
    refuse_optimizer(optimizer)
    refuse_nothing_to_train(model, optimizer)
    where = start(device)
    refuse(model, plan, optimizer, disk, cpu_share)
    refuse_float8_device(plan, where)
    refuse_kernels(model, plan, where, optimizer)
    own = make_communication(communication, plan)
    refuse_memory(plan, where)
    return where, own


def _shape_modules(model: nn.Module, plan: Plan, where: torch.device, meshes: Meshes) -> tuple[list[str], tuple[str, ...]]:
    """What FSDP will wrap: dtypes, the tensor and the expert axis, float8, remat, compile, the loss. Returns the names of
    weights that are gathered in float8, and notes."""
    _to_master(model, PLAN_DTYPES[plan.precision.master])
    apply_tensor_axis(model, plan, meshes)
    apply_expert_axis(model, plan, meshes)
    if plan.precision.compute != "fp32":
        compute_in_fp32(model)
    gathers = float8_gathers(model, plan)
    notes = apply_float8(model, plan, where)
    apply_remat_and_compile(model, plan, compile_options(gathers))
    if plan.kernels.loss == "torch":
        compute_by_torch(model)
    return gathers, notes


def _follow_copies(state: State, ended: Callable[[], None]) -> None:
    """Let all that depends on copies of the weights hear of them. `ended`: of forwards and backwards."""
    copies, offload = state.copies, state.offload
    if state.float8 is not None:
        copies.on_change.append(state.float8.outdate)
    if state.activations is not None:
        copies.on_reset.append(state.activations.reset)
    if offload is not None:
        copies.on_forward.append(weakly(offload.before_forward))
        copies.on_reset.append(weakly(offload.reset))
        copies.on_backward.append(weakly(offload.backward_ran))
    copies.on_forward_end.append(ended)
    copies.on_backward.append(ended)
    copies.on_reset.append(LOG.fail)
    state.work = SameWork(copies, state.device) if dist.get_world_size() > 1 else None


def _make_optimizers(
    model: nn.Module, plan: Plan, device: torch.device, spec: Optimizer | None, memory: OffloadMemory | None
) -> tuple[torch.optim.Optimizer | None, TieredOptimizer | None]:
    """Torch's optimizer, and that of offloaded units, if there are any; the first then includes them."""
    away = [p for unit in memory.units for p in unit.params] if memory else []
    own = plan.kernels.update != "torch"
    made = make_optimizer(model, spec, plan.precision, own_kernels=own, offloaded=away) if spec else None
    return made, TieredOptimizer(plan, device, memory, made) if memory else None


def frozen_on_meta(model: nn.Module, source: Weights | None) -> list[str]:
    """Frozen parameters that no file has, so that they are about to be initialised at random."""
    read = {id(t) for t in source.tensors(model)} if source else set()
    return [n for n, p in model.named_parameters() if p.is_meta and not p.requires_grad and id(p) not in read]


def modules_of(model: nn.Module, unit: Unit) -> list[nn.Module]:
    return [model.get_submodule(path) for path in unit.modules]


def apply_remat_and_compile(model: nn.Module, plan: Plan, options: dict[str, Any] | None = None) -> None:
    """Let modules choose attention, recompute and be compiled as the plan says. Each is inside the next. `options`: of the
    compiler."""
    for unit in plan.units:
        for module, path in zip(modules_of(model, unit), unit.modules, strict=True):
            if path:
                use_backend(module, plan.kernels.attention)
            apply_remat(module, unit.remat)
    if plan.compile:
        for module in compiled_modules(model, plan):
            module.forward = torch.compile(module.forward, options=options)


def compiled_modules(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """The modules to compile: units of one module that has submodules."""
    single = [modules_of(model, u)[0] for u in plan.units if len(u.modules) == 1 and u.modules[0]]
    return [m for m in single if any(True for _ in m.children())]


def _to_master(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert every parameter to the master dtype, in place, so that tied ones stay tied. Buffers keep their dtype. A parameter
    without elements is not trained: FSDP cannot reduce its gradient."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
        p.requires_grad_(p.requires_grad and p.numel() > 0)


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert every floating-point buffer, in place, so that shared ones stay shared."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _apply_fsdp(model: nn.Module, plan: Plan, meshes: Meshes, scalars: set[Owner]) -> dict[str, list[FSDPModule]]:
    """`fully_shard` on each unit, inner before outer, the root last. `scalars`: what is gathered as such."""
    policy = _policy(plan)
    units: dict[str, list[FSDPModule]] = {}
    done: set[nn.Parameter] = set()  # a module around a unit may have its modules in another place too
    for unit in sorted(plan.units, key=lambda u: -max(_depth(m) for m in u.modules)):
        modules = modules_of(model, unit)
        arguments = {"mesh": meshes.data(unit.layout), "reshard_after_forward": unit.reshard, "mp_policy": policy}
        arguments["ignored_params"] = done
        fully_shard(modules if len(modules) > 1 else modules[0], **arguments)  # type: ignore[call-overload]
        units[unit.name] = [m for m in modules if isinstance(m, FSDPModule)]
        done.update(p for module in modules for p in module.parameters())
        gather_for_each_backward(units[unit.name])
        if units[unit.name] and (group := gather_group(units[unit.name][0])) is not None:
            group.gather_scalars(scalars)
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=meshes.data("sharded"), mp_policy=policy, ignored_params=done)
    several = [modules[0] for modules in units.values() if len(modules) > 1]
    if several:
        model.register_forward_pre_hook(partial(forget_unfinished, several), prepend=True)
    return {u.name: units[u.name] for u in plan.units}


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _policy(plan: Plan) -> MixedPrecisionPolicy:
    p = plan.precision
    return MixedPrecisionPolicy(
        param_dtype=PLAN_DTYPES[p.compute] if p.compute != p.master else None,
        reduce_dtype=PLAN_DTYPES[p.reduce] if p.reduce != p.compute else None,
        output_dtype=PLAN_DTYPES[p.output] if p.output else None,
    )


def _copy_whole_shards_once(plan: Plan, units: dict[str, list[FSDPModule]]) -> ComputedGradients:
    """Spare the resident units whose shard is the whole the second pass of their gathers and reductions. Returns whether their
    gradients stay as computed, for the step to set."""
    computed = ComputedGradients()
    for unit in plan.units:
        resident = unit.home.params == unit.home.optimizer == "device"
        group = gather_group(units[unit.name][0]) if resident and units[unit.name] else None
        if group is not None:
            group.copy_once(computed)
    return computed


def _set_prefetch(plan: Plan, units: dict[str, list[FSDPModule]]) -> None:
    """Explicit lists for depths beyond the one unit that FSDP overlaps by itself."""
    chain = [units[u.name][0] for u in plan.units if u.layout != "replicated" and u.modules != ("",)]
    for i, module in enumerate(chain):
        if plan.prefetch.forward > 1:
            module.set_modules_to_forward_prefetch(chain[i + 1 : i + 1 + plan.prefetch.forward])
        if plan.prefetch.backward > 1:
            module.set_modules_to_backward_prefetch(chain[max(0, i - plan.prefetch.backward) : i][::-1])
