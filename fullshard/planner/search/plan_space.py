"""What a search is asked for, and the space of plans that it considers: strategies, meshes, micro-batches, remat choices.

Only makes plans: what they cost is found elsewhere, and so are homes away from the device.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fullshard.base.errors import FullshardError, nearest
from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.model.float8_weights import refuse_float8_tokens
from fullshard.plan.choices import idle_loss_kernel
from fullshard.plan.optimizer import AdamW, Optimizer
from fullshard.plan.plan import Batch, Home, Kernels, Plan, Precision, Prefetch, Wire
from fullshard.planner.jax_limits import idle_on_jax
from fullshard.planner.search.labels import plan_label
from fullshard.planner.strategies import STRATEGIES, choose

REMATS = ("none", "selective", "full")  # from the fastest to the leanest
# (label, plan) pairs that differ in remat alone, the fastest first: only the first that fits counts.
Family = list[tuple[str, Plan]]

FIXABLE = {
    "strategy": str, "replicate": int, "reshard": int, "tensor": int, "remat": str, "micro_batch": int, "accumulate": int,
    "sync": str, "prefetch": int, "prefetch_forward": int, "prefetch_backward": int, "compile": bool, "compute": str,
    "reduce": str, "master": str, "buffers": str, "float8": str, "moments": str, "rounding": str, "wire_gather": str,
    "wire_reduce": str, "wire_block": int, "error_feedback": bool, "wire_memory": str,
    "attention_kernel": str, "loss_kernel": str, "update_kernel": str,
    "home.params": str, "home.optimizer": str, "home.activations": str, "staging": int, "cpu_share": float, "backlog": int,
}  # fmt: skip
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
STRATEGY_OF = {"replicate": "hybrid", "reshard": "hpz"}  # choices that fix a strategy too
UPDATE_CHOICES = ("staging", "cpu_share", "backlog")  # accepted with the prefix `home.` too, as recipes write them


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
    return PlanRequest(description, cluster, sequence, global_batch, _checked_choices(fix), limit, loss, optimizer)


def _checked_choices(fix: dict[str, Any]) -> dict[str, Any]:
    """The pinned choices by their own names, with the strategy that they imply. Raise for unknown ones and wrong types."""
    fix = {name.removeprefix("home.") if name.removeprefix("home.") in UPDATE_CHOICES else name: v for name, v in fix.items()}
    fix = {name: float(value) if FIXABLE.get(name) is float and type(value) is int else value for name, value in fix.items()}
    for name, value in fix.items():
        if name not in FIXABLE:
            raise FullshardError(f"{name!r} cannot be fixed (known: {', '.join(FIXABLE)}){nearest(name, list(FIXABLE))}")
        if not isinstance(value, FIXABLE[name]) or isinstance(value, bool) != (FIXABLE[name] is bool):
            raise FullshardError(f"{name} = {value!r} is not {KINDS[FIXABLE[name]]}")
    if fix.get("remat", "none") not in REMATS:
        known = ", ".join(REMATS)
        raise FullshardError(f"unknown remat {fix['remat']!r}{nearest(fix['remat'], list(REMATS))} (known: {known})")
    for name, owner in STRATEGY_OF.items():
        if name in fix and fix.setdefault("strategy", owner) != owner:
            given = fix["strategy"]
            raise FullshardError(f"{name} = {fix[name]} has no effect with strategy = {given!r}; leave it out, or fix {owner!r}")
    return fix


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
    for name in request.fix if request.engine == "jax" else ():
        if (why := idle_on_jax(name)) is not None:
            raise FullshardError(f"{name} = {request.fix[name]!r} has no effect on JAX: {why}; leave it out")


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


def strategies(request: PlanRequest) -> Iterator[list[Family]]:
    """For each strategy and mesh, its families by growing micro-batch."""
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
            yield [family for family in families if family]
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
    options: list[tuple[str, dict[str, Any]]] = [(n, {}) for n in ("ddp", "zero1", "zero2", "zero3")]
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
                precision=precision_of(request),
                batch=request.batch(1),
                prefetch=_prefetch(fix),
                wire=_wire(fix),
                kernels=Kernels(*(fix.get(f"{part}_kernel", "auto") for part in ("attention", "loss", "update"))),
                remat=remat,
                compile=fix.get("compile", blocks and request.cluster.device.kind != "cpu"),
                home=_least_offload(request.fixed_homes),
                **{key: fix[key] for key in UPDATE_CHOICES if key in fix},
            )
        except FullshardError as error:
            refused.append(error)
            continue
        found.append(plan)
    return found


def _prefetch(fix: dict[str, Any]) -> Prefetch:
    """The pinned depths; `prefetch` is that of both directions."""
    if all(name in fix for name in ("prefetch", "prefetch_forward", "prefetch_backward")):
        raise FullshardError("prefetch has no effect beside prefetch_forward and prefetch_backward; leave it out")
    both = fix.get("prefetch", 1)
    return Prefetch(fix.get("prefetch_forward", both), fix.get("prefetch_backward", both))


def _wire(fix: dict[str, Any]) -> Wire:
    """The pinned wire, by default plain: what is approximate is never chosen."""
    names = [*(f"wire_{part}" for part in ("gather", "reduce", "block", "memory")), "error_feedback"]
    return Wire(**{name.removeprefix("wire_"): fix[name] for name in names if name in fix})


def _least_offload(fixed: dict[str, Any]) -> Home:
    """The home with the most on the device: state leaves it only where parameters are pinned to disk."""
    return Home(**{"optimizer": "host" if fixed.get("params") == "disk" else "device", **fixed})


def precision_of(request: PlanRequest) -> Precision:
    """The pinned precision; by default what the devices compute the fastest in, and fp32 for all else."""
    kinds = ("compute", "reduce", "master", "buffers", "float8", "moments", "rounding")
    given = {k: request.fix[k] for k in kinds if k in request.fix}
    return Precision(**{"compute": request.cluster.device.peak.fastest, **given})
