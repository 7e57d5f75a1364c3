"""Which dim of each parameter is sharded over which axis of the mesh."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fullshard.base.errors import FullshardError
from fullshard.base.text import first_of
from fullshard.on_jax.offload.memory_kinds import DEVICE, at_home
from fullshard.on_jax.tensors.dtypes import Shape
from fullshard.plan.plan import Mesh, Plan, Unit

Axes = tuple[str, ...]
DATA: Axes = ("replicate", "shard")  # the axes over which the rows of a batch are spread
# How the tensor axis splits layers, by the end of their paths: by their outputs, their inputs, or the rows of a table.
OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "wq", "wk", "wv", "w1", "lm_head", "output")
INPUT = ("o_proj", "down_proj", "wo", "w2")
VOCABULARY = ("embed_tokens", "tok_embeddings")
FUSED = ("c_attn",)
KERNEL = "kernel"  # what Flax calls a weight that is (in, out); one called `weight` is (out, in), as torch's


def make_mesh(mesh: Mesh, devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The devices as `replicate × shard × tensor`."""
    found = jax.devices() if devices is None else devices
    if mesh.devices > len(found):
        raise FullshardError(
            f"the plan is for {mesh.devices} devices ({mesh}), but JAX has {len(found)} {found[0].platform} device"
            f"{'s' if len(found) > 1 else ''}; make the plan for {len(found)}"
        )
    if mesh.expert > 1:
        raise FullshardError(f"mesh.expert = {mesh.expert}: the JAX engine has no expert axis; write 1, or use the torch engine")
    shape = (mesh.replicate, mesh.shard, mesh.tensor)
    array = np.array(found[: mesh.devices]).reshape(shape)
    return jax.sharding.Mesh(array, ("replicate", "shard", "tensor"), axis_types=(AxisType.Auto,) * 3)


@dataclass(frozen=True)
class ParameterSharding:
    """How one parameter lies on the devices. `shard`: as its gradient, in device memory. `gathered`: while its unit computes.
    `whole`: why it is not sharded although its unit is, or nothing."""

    unit: Unit
    shard: NamedSharding
    gathered: NamedSharding
    whole: str = ""

    @property
    def rest(self) -> NamedSharding:
        """Between steps."""
        return at_home(self.shard, self.unit.home.params)

    @property
    def state(self) -> NamedSharding:
        """Of its optimizer state between steps."""
        return at_home(self.shard, self.unit.home.optimizer)


@dataclass(frozen=True)
class Shardings:
    """The shardings of all parameters of a plan."""

    mesh: jax.sharding.Mesh
    parameters: Mapping[str, ParameterSharding] = field(default_factory=dict)

    def rows(self) -> NamedSharding:
        """Of a batch: its rows are spread over the data axes."""
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    def everywhere(self) -> NamedSharding:
        """Of a number that every device has."""
        return NamedSharding(self.mesh, PartitionSpec(), memory_kind=DEVICE)

    def at_rest(self) -> dict[str, NamedSharding]:
        return {name: p.rest for name, p in self.parameters.items()}

    def notes(self) -> tuple[str, ...]:
        """What stays whole although its unit is sharded, with the reason."""
        reasons: dict[str, list[str]] = {}
        for name, p in self.parameters.items():
            if p.whole:
                reasons.setdefault(p.whole, []).append(name)
        return tuple(f"{first_of(names)} stays whole on every device: {why}" for why, names in reasons.items())


def plan_shardings(plan: Plan, shapes: Mapping[str, Shape], mesh: jax.sharding.Mesh) -> Shardings:
    """The shardings of parameters with these shapes. Raises if the plan is for another model."""
    found = {}
    for name, shape in shapes.items():
        if (unit := plan.unit_of(name)) is None:
            raise FullshardError(f"no unit of the plan has {name}: it was made for another model; describe this one")
        tensor = _tensor_dim(plan, name, shape)
        axes: list[Axes] = [()] * len(shape)
        if tensor is not None:
            axes[tensor] = ("tensor",)
        gathered, whole = list(axes), ""
        if unit.layout != "replicated" and plan.mesh.shard > 1:
            dim = _shard_dim(shape, tensor, plan.mesh)
            if dim is None:
                whole = f"no dim of {'×'.join(map(str, shape)) or 'a number'} is divisible by mesh.shard = {plan.mesh.shard}"
            else:
                axes[dim] = (*axes[dim], "shard")
        of = lambda dims: NamedSharding(mesh, PartitionSpec(*[d or None for d in dims]), memory_kind=DEVICE)
        found[name] = ParameterSharding(unit, of(axes), of(gathered), whole)
    if plan.mesh.tensor > 1:
        _refuse_unsplit(plan, shapes, found)
    return Shardings(mesh, found)


def _refuse_unsplit(plan: Plan, shapes: Mapping[str, Shape], found: Mapping[str, ParameterSharding]) -> None:
    """Raise for a unit with weights of which the tensor axis splits none: all its devices would compute the same."""
    for unit in plan.units:
        weights = {n: p.gathered for n, p in found.items() if p.unit == unit and len(shapes[n]) > 1}
        if weights and all(sharding.shard_shape(shapes[n]) == shapes[n] for n, sharding in weights.items()):
            raise FullshardError(
                f"unit {unit.name}: mesh.tensor = {plan.mesh.tensor} splits none of its weights, as {next(iter(weights))}; on "
                f"JAX it splits layers called {', '.join((*OUTPUT, *INPUT, *VOCABULARY))}: give yours these names, or write "
                "mesh.tensor = 1"
            )


def _shard_dim(shape: Shape, tensor: int | None, mesh: Mesh) -> int | None:
    """The dim to shard: the first that is divisible, as FSDP shards dim 0, but the tensor axis's own only if no other is."""
    able = [i for i, size in enumerate(shape) if size % (mesh.shard * (mesh.tensor if i == tensor else 1)) == 0 and size]
    return min(able, key=lambda i: (i == tensor, i), default=None)


def _tensor_dim(plan: Plan, name: str, shape: Shape) -> int | None:
    """The dim that the tensor axis splits, or None."""
    if plan.mesh.tensor == 1:
        return None
    if plan.split:
        raise FullshardError("split rules: the JAX engine splits the built-in models alone; leave split out")
    module = name.split(".")[-2] if "." in name else ""
    if module in FUSED:
        raise FullshardError(f"{name}: fused queries, keys and values are not split on JAX; write mesh.tensor = 1")
    dim = _split_dim(module, name.rpartition(".")[2], shape)
    if dim is not None and shape[dim] % plan.mesh.tensor:
        raise FullshardError(
            f"{name}: dim {dim} has {shape[dim]} elements, which mesh.tensor = {plan.mesh.tensor} does not divide"
        )
    return dim


def _split_dim(module: str, leaf: str, shape: Shape) -> int | None:
    """The dim of a layer's parameter that its inputs or outputs are counted by, as the layer is split; None if it is not."""
    outputs, inputs = (1, 0) if leaf == KERNEL else (0, 1)
    if module in VOCABULARY:
        return 0
    if len(shape) == 1:
        return 0 if module in OUTPUT else None
    return outputs if module in OUTPUT else inputs if module in INPUT else None
