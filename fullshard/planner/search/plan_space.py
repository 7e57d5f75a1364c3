"""What a search is asked for, and the space of plans that it considers: strategies, meshes, micro-batches, remat choices.

Only makes plans: what they cost is found elsewhere, and so are homes away from the device.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from fullshard.base.errors import FullshardError, nearest
from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.model.float8_weights import refuse_float8_tokens
from fullshard.plan.choice import choices_of
from fullshard.plan.choice_table import NAMED, checked_fixes, strategy_arguments
from fullshard.plan.choices import idle_loss_kernel
from fullshard.plan.optimizer import AdamW, Optimizer
from fullshard.plan.plan import Batch, Plan, Precision
from fullshard.plan.unit_choices import Remat
from fullshard.planner.search.labels import plan_label
from fullshard.planner.strategies import STRATEGIES, choose

REMATS = get_args(Remat)  # from the fastest to the leanest
# (label, plan) pairs that differ in remat alone, the fastest first: only the first that fits counts.
Family = list[tuple[str, Plan]]

OF_SHAPE = ("strategy", "replicate", "reshard", "tensor", "micro_batch", "accumulate", "sync")  # made by the search itself


@dataclass(frozen=True)
class PlanRequest:
    """What a search is asked for. `fix`: choices that are pinned, by name."""

    description: Description
    cluster: Cluster
    sequence: int
    global_batch: int
    fix: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    loss: str = "chunked"
    optimizer: Optimizer = field(default_factory=AdamW)
    clip: bool = True
    disk: bool = True  # whether optimizer state and parameters may go to disk
    disk_activations: bool = False  # whether activations may, too
    engine: str = "torch"  # which shall carry the plan out
    check: Callable[[], None] = lambda: None  # called between estimates; what it raises ends the search

    def batch(self, micro_batch: int, accumulate: int = 1, sync: Any = "every") -> Batch:
        """The batch of a plan with so many rows."""
        dims = self.description.costs.dims if self.description.costs else ""
        return Batch(micro_batch, self.sequence, accumulate, sync, dims)

    @property
    def fixed_homes(self) -> dict[str, Any]:
        """The homes that `fix` pins, by kind of bytes."""
        return {key.removeprefix("home."): value for key, value in self.fix.items() if key.startswith("home.")}

    @property
    def to_disk(self) -> tuple[str, ...]:
        """The kinds of bytes that may go on from host to disk, what costs least time first; never what `fix` pins."""
        may = {"optimizer": self.disk, "params": self.disk, "activations": self.disk and self.disk_activations}
        return tuple(kind for kind, allowed in may.items() if allowed and kind not in self.fixed_homes)


def plan_request(
    description: Description,
    cluster: Cluster,
    sequence: int | None,
    global_batch: int | None,
    fix: dict[str, Any],
    limit: int | None,
    loss: str,
    optimizer: Optimizer,
) -> PlanRequest:
    """Check what was asked for and fill in what the description has; raise one sentence for anything unknown."""
    shape = description.costs.shape if description.costs else None
    example = description.costs.example if description.costs else None
    if example and sequence not in (None, 1):
        raise FullshardError(f"sequence = {sequence} has no effect: this model was described for rows of {example.dims}")
    sequence = 1 if example else shape[1] if sequence is None and shape else sequence
    if sequence is None:
        raise FullshardError("a plan needs a sequence length; give sequence")
    rows = example.rows if example else shape[0] or 1 if shape else 1
    global_batch = cluster.devices * rows if global_batch is None else global_batch
    for name, value in (("sequence", sequence), ("global batch", global_batch)):
        if value < 1:
            raise FullshardError(f"the {name} must be at least 1, not {value}")
    return PlanRequest(description, cluster, sequence, global_batch, checked_fixes(fix), limit, loss, optimizer)


def engine_for(cluster: Cluster, wanted: str | None) -> str:
    """The engine that is to carry plans for this cluster out: the wanted one, else torch, but JAX for TPUs."""
    is_tpu = cluster.device.kind == "tpu"
    if is_tpu and wanted == "torch":
        raise FullshardError(
            f"{cluster.device.name} is a TPU, which only the JAX engine runs; write jax, or leave the engine out"
        )
    return wanted or ("jax" if is_tpu else "torch")


def refuse_choices_of_torch(request: PlanRequest) -> None:
    """Raise if something is pinned that only the torch engine has."""
    for name, value in request.fix.items():
        if limit := NAMED[name].limit(request.engine, value):
            raise FullshardError(limit.sentence(f"{name} = {value!r}", request.engine))


def refuse_idle_backlog(request: PlanRequest) -> None:
    """Raise if a backlog is pinned where gradients wait for their norm anyway."""
    if "backlog" in request.fix and (request.clip or precision_of(request).compute == "fp16"):
        why = "with clipping" if request.clip else "with compute = 'fp16'"
        raise FullshardError(
            f"backlog = {request.fix['backlog']} has no effect {why}: all gradients wait for their norm; leave one of them out"
        )


def refuse_idle_loss_kernel(request: PlanRequest) -> None:
    """Raise if a kernel is pinned of a loss that is not the planned one."""
    if why := idle_loss_kernel("loss_kernel", request.fix.get("loss_kernel", "auto"), request.loss):
        raise FullshardError(why)


@dataclass(frozen=True)
class StrategyFamilies:
    """A strategy with its own choices, and its families by growing micro-batch."""

    name: str
    choices: dict[str, Any]
    families: list[Family]


def strategies(request: PlanRequest) -> Iterator[StrategyFamilies]:
    """Each strategy and mesh of which a plan can be made."""
    axes = {tensor: list(_shapes(request, request.cluster.devices // tensor)) for tensor in _tensor_axes(request)}
    if not any(axes.values()):
        ranks = request.cluster.devices // max(axes)
        raise FullshardError(
            f"a global batch of {request.global_batch} cannot be cut for {ranks} data ranks"
            f"{_fixed(request, 'micro_batch', 'accumulate')}; give a multiple of {ranks * request.fix.get('micro_batch', 1)}"
        )
    made = 0
    refused: list[FullshardError] = []
    for tensor, shapes in axes.items():
        for name, choices in _strategies(request, request.cluster.devices // tensor, tensor):
            first = _family(request, name, choices, tensor, refused) if shapes else []
            families = [_shaped(request, name, choices, first, shape, refused) for shape in shapes]
            made += sum(map(len, families))
            if any(families):
                yield StrategyFamilies(name, choices, [family for family in families if family])
    if not made and refused:
        often = Counter(map(str, refused))
        raise max(refused, key=lambda error: often[str(error)])  # not what one strategy alone cannot do
    if not made:
        raise FullshardError(f"no plan can be made with {_fixed(request, *request.fix).strip(' ()')}; fix less")


def _tensor_axes(request: PlanRequest) -> list[int]:
    """Sizes of the tensor axis to try: the pinned one; else 1 and those that the model was traced for, within a node."""
    devices, costs = request.cluster.devices, request.description.costs
    if (fixed := request.fix.get("tensor")) is not None:
        if fixed < 1 or devices % fixed:
            raise FullshardError(f"tensor = {fixed} must divide the {devices} devices")
        return [fixed]
    split = costs.split if costs else {}
    node = min(request.cluster.node.devices, devices)
    return [1, *[n for n in split if node % n == 0]]


def _fixed(request: PlanRequest, *names: str) -> str:
    given = [f"{n} = {request.fix[n]!r}" for n in names if n in request.fix]
    return f" ({', '.join(given)})" if given else ""


def _shapes(request: PlanRequest, ranks: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, accumulate) whose product is each rank's share of the global batch."""
    if request.global_batch % ranks:
        return
    share = request.global_batch // ranks
    for micro in (n for n in range(1, min(share, 32) + 1) if share % n == 0):
        accumulate = share // micro
        if request.fix.get("micro_batch", micro) == micro and request.fix.get("accumulate", accumulate) == accumulate:
            yield micro, accumulate


def _strategies(request: PlanRequest, ranks: int, tensor: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of strategies with their choices arguments; groups of hybrid and hpz are one, two, four or eight nodes."""
    fixed = request.fix.get("strategy")
    if fixed is not None and fixed not in STRATEGIES:
        raise FullshardError(f"unknown strategy {fixed!r}{nearest(fixed, list(STRATEGIES))} (known: {', '.join(STRATEGIES)})")
    node = request.cluster.node.devices // tensor or 1
    groups = [n for n in (node, 2 * node, 4 * node, 8 * node) if 1 < n < ranks and ranks % n == 0]
    names = ("zero3", "ddp", "zero1", "zero2") if ranks == 1 else ("ddp", "zero1", "zero2", "zero3")  # of equals, the first
    options: list[tuple[str, dict[str, Any]]] = [(n, {}) for n in names]
    options += [("hybrid", {"replicate": ranks // n}) for n in groups]
    options += [("hpz", {"reshard": n}) for n in groups] if request.engine == "torch" else []
    if fixed == "hybrid" and "replicate" in request.fix:
        options = [("hybrid", {"replicate": request.fix["replicate"]})]
    if fixed == "hpz" and "reshard" in request.fix:
        options = [("hpz", {"reshard": request.fix["reshard"]})]
    for name, choices in options:
        if fixed in (None, name) and all(request.fix.get(k, v) == v for k, v in choices.items()):
            yield name, choices


def _shaped(
    request: PlanRequest,
    name: str,
    choices: dict[str, Any],
    plans: list[Plan],
    shape: tuple[int, int],
    refused: list[FullshardError],
) -> Family:
    """The family of a strategy with this (micro-batch, accumulate)."""
    micro, accumulate = shape
    try:
        batch = request.batch(micro, accumulate, request.fix.get("sync", "every"))
        refuse_float8_tokens(precision_of(request), batch)
        shaped = [replace(plan, batch=batch) for plan in plans]
    except FullshardError as error:
        refused.append(error)
        return []
    return [(plan_label(name, choices, plan), plan) for plan in shaped]


def _family(request: PlanRequest, name: str, choices: dict[str, Any], tensor: int, refused: list[FullshardError]) -> list[Plan]:
    """The plans of a strategy, one for each remat choice, with one row a micro-batch."""
    found, fix = [], request.fix
    blocks = any(u.kind == "block" for u in request.description.units)
    for remat in REMATS if blocks else ("none",):
        if fix.get("remat", remat) != remat:
            continue
        try:
            plan = choose(
                name,
                request.description,
                devices=request.cluster.devices,
                tensor=tensor,
                **choices,
                batch=request.batch(1),
                **strategy_arguments(_open_choices(request, blocks) | {"remat": remat}, str),
            )
        except FullshardError as error:
            refused.append(error)
            continue
        found.append(plan)
    return found


def _open_choices(request: PlanRequest, blocks: bool) -> dict[str, Any]:
    """What is pinned, and for the rest what devices do fastest with the most on them: state leaves the device only where
    parameters are pinned to disk. What is approximate is never chosen."""
    optimizer = "host" if request.fix.get("home.params") == "disk" else "device"
    compiled = blocks and request.cluster.device.kind != "cpu"
    fixed = {name: value for name, value in request.fix.items() if name not in OF_SHAPE}
    return {"compute": request.cluster.device.peak.fastest, "compile": compiled, "home.optimizer": optimizer} | fixed


def precision_of(request: PlanRequest) -> Precision:
    """The pinned precision; by default what the devices compute the fastest in, and fp32 for all else."""
    kinds = {row.field: request.fix[row.name] for row in choices_of(Precision) if row.name in request.fix}
    return Precision(**{"compute": request.cluster.device.peak.fastest} | kinds)
