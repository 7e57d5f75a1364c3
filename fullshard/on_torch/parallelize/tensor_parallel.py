"""Tensor parallelism: by a plan's own rules, and for the built-in models and Llama-like Hugging Face models without any.

The first linear layers of attention and feed-forward are split by output features, the last by input features, with one
all-reduce each. Embedding and head are split by vocabulary if it divides evenly. Norms are replicated.
"""

import fnmatch
from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fullshard.base.errors import FullshardError, a_kind, nearest
from fullshard.model.description import UnitDescription
from fullshard.on_torch.model.tied_parameters import tied_owners
from fullshard.on_torch.ranks.device_meshes import Meshes
from fullshard.plan.plan import Plan, Split, SplitRules, Unit

AnyUnit = Unit | UnitDescription
SPLIT_OUTPUT = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "wq", "wk", "wv", "w1", "w3"}
SPLIT_INPUT = {"o_proj", "down_proj", "wo", "w2"}
PER_HEAD_NORM = {"q_norm", "k_norm"}  # applied to this rank's heads, (B, T, heads, head_dim)
QUERY_KEY_VALUE = {"q_proj", "k_proj", "v_proj", "wq", "wk", "wv"}


def apply_tensor_axis(model: nn.Module, plan: Plan, meshes: Meshes) -> None:
    """Split the model's modules over the tensor axis. Tied parameters stay tied."""
    if plan.mesh.tensor > 1:
        split_units(model, plan.units, plan.mesh.tensor, [meshes.tensor(u.layout) for u in plan.units], plan.split)


def split_units(
    model: nn.Module, units: Sequence[AnyUnit], tensor: int, meshes: Sequence[DeviceMesh], rules: SplitRules = ()
) -> None:
    """Split the modules of each unit over the mesh at the same index."""
    ties = tied_owners(model)
    for unit, mesh in zip(units, meshes, strict=True):
        styles = _styles(model, unit, tensor, rules)
        if styles:
            parallelize_module(model, mesh, styles)
    for (first, name), *others in ties:
        for module, other in others:
            module.register_parameter(other, first._parameters[name])


def refuse_tensor_axis(model: nn.Module, plan: Plan) -> None:
    """Raise, before anything is changed, if a unit cannot be split over the plan's tensor axis."""
    if plan.mesh.tensor > 1:
        refuse_split(model, plan.units, plan.mesh.tensor, plan.split)


def refuse_split(model: nn.Module, units: Sequence[AnyUnit], tensor: int, rules: SplitRules = ()) -> None:
    """Raise if a unit cannot be split over `tensor` ranks, or no module can, or a rule matches none."""
    paths = [path for unit in units for path, _ in _owners(model, unit)]
    names = sorted({path.rpartition(".")[2] for path in paths})
    for pattern, _ in rules:
        if not fnmatch.filter(paths, pattern):
            raise FullshardError(
                f"split: no module with parameters is called {pattern!r}{nearest(pattern.rpartition('.')[2], names)}"
            )
    found = [_styles(model, unit, tensor, rules) for unit in units]  # a list, so that every unit is checked
    if not any(found):
        raise FullshardError(
            f"mesh.tensor = {tensor}: no module of this model has a tensor-parallel layout; "
            "use tensor = 1 (the built-in models and Llama-like Hugging Face models can be split)"
        )


def _styles(model: nn.Module, unit: AnyUnit, tensor: int, rules: SplitRules) -> dict[str, ParallelStyle]:
    """The parallel style of each module of a unit, by path. Raises for a module that cannot be split."""
    styles: dict[str, ParallelStyle] = {}
    for path, module in _owners(model, unit):
        name = path.rpartition(".")[2]
        how = next((how for pattern, how in rules if fnmatch.fnmatchcase(path, pattern)), None) or _usual(name)
        if how in ("output", "input"):
            _refuse_uneven(model, unit, path, module, tensor, how)
            styles[path] = ColwiseParallel() if how == "output" else RowwiseParallel()
        elif how == "vocabulary":
            _refuse_vocabulary(unit, path, module, tensor)
            styles[path] = _vocabulary_style(module)
        elif how == "whole":
            continue
        elif name in PER_HEAD_NORM:
            styles[path] = SequenceParallel(sequence_dim=2, use_local_output=True)
        elif path in unit.modules and _vocabulary(module) and _splits_vocabulary(model, unit, tensor):
            styles[path] = _vocabulary_style(module)
        elif path not in unit.modules and any(p.ndim > 1 for p in module.parameters(recurse=False)):
            raise FullshardError(
                f"unit {unit.name}: {path} ({type(module).__name__}) has no tensor-parallel layout, so mesh.tensor = {tensor} "
                f"cannot be honoured; say how with split={{'*.{name}': 'output'}} ('input', 'whole'), or use tensor = 1"
            )
    return styles


def _usual(name: str) -> Split | None:
    """How a module of this name is split in Llama-like models."""
    return "output" if name in SPLIT_OUTPUT else "input" if name in SPLIT_INPUT else None


def _refuse_vocabulary(unit: AnyUnit, path: str, module: nn.Module, tensor: int) -> None:
    if not isinstance(module, nn.Embedding | nn.Linear) or not _vocabulary(module) or module.weight.shape[0] % tensor:
        raise FullshardError(
            f"unit {unit.name}: {path} is no embedding or linear layer whose rows mesh.tensor = {tensor} divides; write 'whole'"
        )


def _owners(model: nn.Module, unit: AnyUnit) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a unit that own parameters directly."""
    for root in unit.modules:
        if root == "":
            continue
        for sub, module in model.get_submodule(root).named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                yield (f"{root}.{sub}" if sub else root), module


def _refuse_uneven(model: nn.Module, unit: AnyUnit, path: str, module: nn.Module, tensor: int, how: str) -> None:
    parent, _, name = path.rpartition(".")
    if not isinstance(module, nn.Linear):
        raise FullshardError(
            f"unit {unit.name}: {path} is {a_kind(module)}, not a Linear; mesh.tensor = {tensor} cannot split it"
        )
    size = module.out_features if how == "output" else module.in_features
    head_dim = getattr(model.get_submodule(parent), "head_dim", 1) if name in QUERY_KEY_VALUE else 1
    if size % (head_dim * tensor):
        what = f"{size // head_dim} heads" if head_dim > 1 else f"{size} features"
        raise FullshardError(
            f"unit {unit.name}: {path} has {what}, which mesh.tensor = {tensor} does not divide; use a tensor axis that does"
        )


def _vocabulary(module: nn.Module) -> bool:
    """True for a plain embedding or linear layer. A subclass may compute more than the product."""
    return type(module) is nn.Embedding or type(module) is nn.Linear


def _splits_vocabulary(model: nn.Module, unit: AnyUnit, tensor: int) -> bool:
    """True if all embeddings and heads of the unit can be split. It is all or none, because they may be tied."""
    tables = [m for path in unit.modules if path and (m := model.get_submodule(path)) and isinstance(m, nn.Embedding | nn.Linear)]
    return all(_vocabulary(m) and m.weight.shape[0] % tensor == 0 for m in tables)


def _vocabulary_style(module: nn.Module) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    return ColwiseParallel(output_layouts=Replicate())
