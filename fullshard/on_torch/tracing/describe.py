"""Describe a model: group its modules into units, and list the tensors of each unit.

Works on any `nn.Module`, on the meta device or not. Reads only names, shapes and registration order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fullshard.base.errors import FullshardError, checked_call
from fullshard.model.description import Description, Tensor, UnitDescription, UnitKind
from fullshard.model.module_grouping import ModuleNode, UnitGroup, group_modules, owner_of
from fullshard.on_torch.loss.losses import LossFunction, called_loss, summed_loss
from fullshard.on_torch.model.linear_weights import linear_weights
from fullshard.on_torch.model.tied_parameters import parameter_names
from fullshard.on_torch.parallelize.experts import expert_count, expert_modules
from fullshard.on_torch.tensors.dtypes import plan_dtype_name
from fullshard.on_torch.tracing import trace_costs
from fullshard.on_torch.tracing.outside_uses import OutsideUses, outside_uses
from fullshard.on_torch.tracing.trace_batch import ExampleBatches, token_batch
from fullshard.plan.plan import DType, Split, SplitRules
from fullshard.plan.unit_choices import checked_splits

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@checked_call("describe(model), with a torch.nn.Module", model=nn.Module)
def describe(
    model: nn.Module,
    *,
    classes: Sequence[str] = (),
    names: Sequence[str] = (),
    min_params: int = 0,
    experts: bool = False,
    small: int = 0,
    title: str = "",
    micro_batch: int = 0,
    sequence: int = 0,
    example: Any = None,
    loss: LossFunction | None = None,
    costs: bool = True,
    compute: DType = "bf16",
    tensor: Sequence[int] = (),
    expert: Sequence[int] = (),
    split: Mapping[str, Split] | SplitRules = (),
) -> Description:
    """Group the modules of `model` into units. With `micro_batch` and `sequence`, also trace the costs of computing them
    in dtype `compute`, and the costs on a rank of a `tensor` or `expert` axis of each of these sizes. `split`: how a tensor
    axis splits modules, as in a plan.

    A model that is no causal language model is traced with `example`, a batch of any tensors, and `loss`, the function that
    `train_step` will get. Only shapes matter, and the values of integers. A traced model also shows parameters that it uses
    outside the forward of their modules: their unit is one that is gathered by then. With `costs=False` this is all that is
    traced, and the description has no costs.

    By default each repeated block is a unit. Modules before the blocks form the unit `embed`, modules after them the unit
    `head`. With `experts`, the experts of each block are a unit of their own: they gather apart from the rest, and can be
    spread over an expert axis. With `small`, the modules of a block whose tensors all have fewer elements, such as its norms,
    form a unit that strategies keep whole on every rank. Units that share a tied parameter are merged. To choose the blocks
    yourself, give one of: `classes`, class names; `names`, module paths with wildcards; `min_params`, the size from which a
    module is its own unit.
    """
    if next(model.parameters(), None) is None:
        raise FullshardError(f"{title or type(model).__name__} has no parameters; there is nothing to shard")
    apart = _find_experts(model, experts, title)
    rule: dict[str, Any] = {"classes": classes, "names": names, "min_params": min_params, "apart": apart, "small": small}
    title = title or type(model).__name__
    found = _described(model, title, {}, rule)
    axes: dict[str, Any] = {"compute": compute, "tensor": tensor, "expert": expert, "rules": checked_splits(split)}
    if example is not None:
        _refuse_two_shapes(micro_batch, sequence)
        function = _example_loss(example, loss)
        batches = ExampleBatches(example)
        rows = batches.of(batches.rows)
        outside = outside_uses(model, found, rows, function, strict=not costs, real=batches.example)
        found = _described(model, title, outside, rule)
        return replace(found, costs=trace_costs.example_costs(model, found, example, function, **axes)) if costs else found
    if loss is not None:
        raise FullshardError("loss has no effect without an example; write describe(model, example=batch, loss=function)")
    if not micro_batch or not sequence:
        if not costs:
            raise FullshardError(
                "costs = False has no effect without a batch; write describe(model, example=batch, loss=function)"
            )
        return found
    outside = outside_uses(model, found, token_batch(2, min(sequence, 64)), called_loss, strict=not costs)
    found = _described(model, title, outside, rule)
    axes |= {"micro_batch": micro_batch, "sequence": sequence}
    return replace(found, costs=trace_costs.costs(model, found, **axes)) if costs else found


def _described(model: nn.Module, title: str, outside: OutsideUses, rule: dict[str, Any]) -> Description:
    """The model in units, without costs."""
    tree = _tree(model, {}, outside)
    units, buffers = _list_tensors(model, group_modules(tree, parameter_names(model), **rule), outside)
    return Description(title, tuple(units), buffers)


def _refuse_two_shapes(micro_batch: int, sequence: int) -> None:
    if micro_batch or sequence:
        raise FullshardError("an example has a shape of its own; leave micro_batch and sequence out")


def _example_loss(example: Any, loss: LossFunction | None) -> LossFunction:
    if loss is not None:
        return loss
    if isinstance(example, Mapping) and "input_ids" in example and "labels" in example:
        return summed_loss
    raise FullshardError("an example needs its loss; write describe(model, example=batch, loss=function), as train_step takes it")


def _find_experts(model: nn.Module, apart: bool, title: str) -> list[str]:
    found = list(expert_modules(model)) if apart else []
    if apart and not found:
        raise FullshardError(
            f"{title or type(model).__name__} has no experts that could be units of their own; leave experts out"
        )
    return found


def _tree(module: nn.Module, known: dict[nn.Module, ModuleNode], outside: OutsideUses) -> ModuleNode:
    """The modules of a model as nodes. `known`: those made already."""
    if module not in known:
        own = {n: p for n, p in module._parameters.items() if p is not None}
        runs = "forward" in vars(module) or type(module).forward is not nn.Module.forward
        runs &= not isinstance(module, (nn.ModuleList, nn.ModuleDict))  # which torch 2.11 does not take, though they may run
        known[module] = ModuleNode(
            cls=type(module),
            parameters={n: p.numel() for n, p in own.items()},
            identities={n: id(p) for n, p in own.items()},
            children=[(n, _tree(child, known, outside)) for n, child in module.named_children()],
            is_container=isinstance(module, CONTAINERS),
            has_forward=runs,
            outside=frozenset(outside.get(module, ()) if runs else map(id, module.parameters())),
            kind=_kind(module),
        )
    return known[module]


def _kind(module: nn.Module) -> UnitKind:
    if isinstance(module, nn.Embedding):
        return "embed"
    return "experts" if expert_count(module) else "block"


def _list_tensors(
    model: nn.Module, groups: list[UnitGroup], outside: OutsideUses
) -> tuple[list[UnitDescription], tuple[Tensor, ...]]:
    """The units with their tensors, and the buffers that are in no unit."""
    names = parameter_names(model)
    linear = linear_weights(model)
    parameters: dict[str, list[Tensor]] = {g.name: [] for g in groups}
    for name, p in model.named_parameters():
        group = owner_of(name, groups)
        assert group is not None, name
        others = tuple(n for n in names[id(p)] if n != name)
        kind = plan_dtype_name(name, p.dtype)
        early = any(id(p) in outside.get(model.get_submodule(n.rpartition(".")[0]), ()) for n in names[id(p)])
        parameters[group.name].append(Tensor(name, tuple(p.shape), kind, p.requires_grad, others, name in linear, early))
    buffers: dict[str, list[Tensor]] = {"": [], **{g.name: [] for g in groups}}
    for name, b in model.named_buffers():
        group = owner_of(name, groups)
        buffers[group.name if group else ""].append(Tensor(name, tuple(b.shape), plan_dtype_name(name, b.dtype), False))
    units = [UnitDescription(g.name, g.kind, tuple(g.modules), tuple(parameters[g.name]), tuple(buffers[g.name])) for g in groups]
    return units, tuple(buffers[""])
