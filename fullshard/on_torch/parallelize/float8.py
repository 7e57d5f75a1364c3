"""Float8 training by torchao: linear layers of blocks multiply in float8, and weights with one scale are gathered in it.

Parameters stay plain shards in the master dtype: checkpoints, clipping and updates do not see float8. torchao is imported
when a plan asks for float8.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.base.errors import FullshardError
from fullshard.model.description import Tensor as TensorDescription
from fullshard.model.float8_weights import GRAIN, computes_in_float8, gathered_in_float8, refuse_float8_tokens
from fullshard.on_torch.model.linear_weights import linear_weights
from fullshard.on_torch.model.tied_parameters import parameter_names
from fullshard.on_torch.parallelize.experts import expert_modules
from fullshard.on_torch.private.fsdp_groups import gather_by
from fullshard.on_torch.private.torch_internals import options_without_saved
from fullshard.on_torch.ranks.device_meshes import Meshes
from fullshard.plan.plan import Plan, Unit

CAPABILITY = (8, 9)  # the first GPUs with matrix products in float8: Ada and Hopper
EAGER = "float8 without compile = true takes longer than bf16: each cast is several kernels"
EMULATED = "float8 is emulated on a CPU: results are those of float8, and steps take longer than in bf16"


def refuse_float8_device(plan: Plan, device: torch.device) -> None:
    """Raise if the plan asks for float8 and the device has no such products. A CPU emulates them."""
    if plan.precision.float8 is None or device.type != "cuda":
        return
    if (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        raise FullshardError(
            f"precision.float8 = {plan.precision.float8!r} needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, "
            f"and {torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}; leave it out"
        )


def refuse_float8(model: nn.Module, plan: Plan) -> None:
    """Raise, before anything is changed, if the plan's float8 cannot be carried out on the model."""
    kind = plan.precision.float8
    if kind is None:
        return
    if importlib.util.find_spec("torchao") is None:
        raise FullshardError(
            f"precision.float8 = {kind!r} needs torchao, which is not installed; pip install 'fullshard[float8]'"
        )
    if experts := list(expert_modules(model)):
        raise FullshardError(
            f"precision.float8 = {kind!r}: this model has experts ({experts[0]}), which do not multiply in float8 yet; leave "
            "it out"
        )
    if not _float8_names(model, plan, computes_in_float8):
        raise FullshardError(
            f"precision.float8 = {kind!r} has no effect: no block has a trained nn.Linear with sizes that are multiples of "
            f"{GRAIN}; leave it out"
        )
    refuse_float8_tokens(plan.precision, plan.batch)


def apply_float8(model: nn.Module, plan: Plan, device: torch.device) -> tuple[str, ...]:
    """Replace the linear layers that compute in float8 by torchao's. Returns notes for the user."""
    kind = plan.precision.float8
    if kind is None:
        return ()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulate = device.type == "cpu"
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(kind), emulate=emulate)
    for unit, names in _float8_names(model, plan, computes_in_float8).items():
        chosen = {name.removeprefix(f"{unit}.").removesuffix(".weight") for name in names}
        block = model.get_submodule(unit)
        convert_to_float8_training(block, config=config, module_filter_fn=lambda _, path, chosen=chosen: path in chosen)
    return (EMULATED,) if emulate else () if plan.compile else (EAGER,)


def _float8_names(model: nn.Module, plan: Plan, rule: Callable[[Plan, Unit, TensorDescription], bool]) -> dict[str, list[str]]:
    """The names of the parameters that the rule holds for, by unit. To be asked before layers are replaced."""
    names, linear = parameter_names(model), linear_weights(model)
    found: dict[str, list[str]] = {}
    for name, p in model.named_parameters():
        unit = plan.unit_of(name)
        ties = tuple(n for n in names[id(p)] if n != name)
        about = TensorDescription(name, tuple(p.shape), trainable=p.requires_grad, ties=ties, linear=name in linear)
        if unit is not None and rule(plan, unit, about):
            found.setdefault(unit.name, []).append(name)
    return found


# -- gathers -----------------------------------------------------------------------------------------------


def float8_gathers(model: nn.Module, plan: Plan) -> list[str]:
    """The names of the weights that are gathered in float8. To be asked before layers are replaced."""
    found = _float8_names(model, plan, gathered_in_float8) if plan.precision.float8 == "tensorwise" else {}
    return [name for names in found.values() for name in names]


def compile_options(names: list[str]) -> dict[str, Any] | None:
    """Options of the compiler for blocks with these weights. A product of backward needs a weight transposed, and the compiler
    would copy it in forward and keep the copy: a byte for each parameter of the model on every rank."""
    return options_without_saved(torch.float8_e4m3fn) if names else None


class Float8Scales:
    """The scales of all weights that are gathered in float8, from the largest element of each, on all ranks.

    `stale`: they are computed again before the next gather. Every rank gathers the same units in the same order, so that
    collective is safe there.
    """

    def __init__(self, weights: list[DTensor], group: dist.ProcessGroup, kind: torch.dtype):
        self.weights, self.group, self.kind, self.stale = weights, group, kind, True
        self.values = torch.ones(len(weights), device=weights[0].device)

    def outdate(self) -> None:
        """The weights have changed."""
        self.stale = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the scales if they are stale. Collective."""
        if not self.stale:
            return
        from torchao.float8.float8_utils import amax_to_scale

        largest = torch.stack(torch._foreach_norm([w.to_local() for w in self.weights], math.inf))
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        # Rounded to bf16 first, as weights are on one device: sharding does not change results.
        self.values.copy_(amax_to_scale(largest.bfloat16(), self.kind))
        self.stale = False


def gather_in_float8(model: nn.Module, names: list[str], meshes: Meshes) -> Float8Scales | None:
    """Let FSDP gather these weights, which are sharded and have values, in float8."""
    if not names:
        return None
    layers: list[Any] = [model.get_submodule(name.removesuffix(".weight")) for name in names]
    kind = layers[0].config.cast_config_weight.target_dtype
    scales = Float8Scales([layer.weight for layer in layers], meshes.sharded.get_group("shard"), kind)
    for i, layer in enumerate(layers):
        gather_by(layer.weight, *_gather_hooks(layer, scales, i))
    return scales


def _gather_hooks(layer: Any, scales: Float8Scales, index: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What FSDP calls before and after the gather of a layer's weight: torchao's cast, and its view of the gathered bytes."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Float8Cast

    shard: Tensor = layer.weight.to_local().detach()
    about = (layer.linear_mm_config, scales.kind)

    def before(mesh: Any) -> Any:
        scales.refresh()
        return Float8Cast(shard.bfloat16(), *about, scales.values[index]).fsdp_pre_all_gather(mesh)

    return before, Float8Cast(shard, *about).fsdp_post_all_gather
