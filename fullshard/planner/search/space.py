"""What a search is asked for, and every plan that might answer: strategies, meshes, micro-batches, remat choices.

Makes plans and says nothing of what they cost; homes elsewhere come later, where a plan does not fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fullshard.cluster.cluster import Cluster
from fullshard.errors import FullshardError, nearest
from fullshard.model.description import Description
from fullshard.optimizer import AdamW, Optimizer
from fullshard.plan import Batch, Home, Plan, Precision, Prefetch
from fullshard.planner.search.explain import home_words
from fullshard.strategies import STRATEGIES, choose

REMATS = ("none", "selective", "full")  # from the fastest to the leanest
# Plans, each after what it is called, that differ in remat alone, the fastest first: one that fits makes the others pointless.
Family = list[tuple[str, Plan]]

FIXABLE = {
    "strategy": str, "replicate": int, "reshard": int, "tensor": int, "remat": str, "micro_batch": int, "accumulate": int,
    "sync": str, "prefetch": int, "compile": bool, "compute": str, "reduce": str, "master": str,
    "home.params": str, "home.optimizer": str, "home.activations": str, "staging": int, "cpu_share": float, "backlog": int,
}  # fmt: skip
OWN = {"replicate": "hybrid", "reshard": "hpz"}  # choices of one strategy, which they fix with them
OF_UPDATES = ("staging", "cpu_share", "backlog")  # of the whole plan; recipes have them under home, as they may be here


@dataclass(frozen=True)
class Wanted:
    """What is to be planned for."""

    description: Description
    cluster: Cluster
    sequence: int
    global_batch: int
    fix: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    loss: str = "chunked"
    optimizer: Optimizer = field(default_factory=AdamW)
    clip: bool = True
    disk: bool = True  # whether state and parameters may go there
    spill: bool = False  # and activations

    @property
    def homes(self) -> dict[str, Any]:
        """Homes that are fixed."""
        return {key.removeprefix("home."): value for key, value in self.fix.items() if key.startswith("home.")}

    @property
    def onward(self) -> tuple[str, ...]:
        """What may go on from the host to disk, the cheapest to miss first; not what is fixed to be elsewhere."""
        may = {"optimizer": self.disk, "params": self.disk, "activations": self.disk and self.spill}
        return tuple(kind for kind, so in may.items() if so and kind not in self.homes)


def want(
    description: Description,
    cluster: Cluster,
    sequence: int | None,
    global_batch: int | None,
    fix: dict[str, Any],
    limit: int | None,
    loss: str,
    optimizer: Optimizer,
) -> Wanted:
    shape = description.costs.shape if description.costs else None
    sequence = shape[1] if sequence is None and shape else sequence
    if sequence is None:
        raise FullshardError("a plan needs a sequence length; give sequence")
    global_batch = cluster.devices * (shape[0] if shape else 1) if global_batch is None else global_batch
    for name, value in (("sequence", sequence), ("global batch", global_batch)):
        if value < 1:
            raise FullshardError(f"the {name} must be at least 1, not {value}")
    fix = {name.removeprefix("home.") if name.removeprefix("home.") in OF_UPDATES else name: v for name, v in fix.items()}
    fix = {name: float(value) if FIXABLE.get(name) is float and type(value) is int else value for name, value in fix.items()}
    for name, value in fix.items():
        if name not in FIXABLE:
            raise FullshardError(f"{name!r} cannot be fixed (known: {', '.join(FIXABLE)}){nearest(name, list(FIXABLE))}")
        if not isinstance(value, FIXABLE[name]) or isinstance(value, bool) != (FIXABLE[name] is bool):
            raise FullshardError(
                f"{name} = {value!r} is not {'a ' if FIXABLE[name] is not int else 'an '}{FIXABLE[name].__name__}"
            )
    if fix.get("remat", "none") not in REMATS:
        known = ", ".join(REMATS)
        raise FullshardError(f"unknown remat {fix['remat']!r}{nearest(fix['remat'], list(REMATS))} (known: {known})")
    for name, owner in OWN.items():
        if name in fix and fix.setdefault("strategy", owner) != owner:
            given = fix["strategy"]
            raise FullshardError(f"{name} = {fix[name]} has no effect with strategy = {given!r}; leave it out, or fix {owner!r}")
    return Wanted(description, cluster, sequence, global_batch, fix, limit, loss, optimizer)


def refuse_idle_backlog(wanted: Wanted) -> None:
    if "backlog" in wanted.fix and (wanted.clip or precision_of(wanted).compute == "fp16"):
        why = "with clipping" if wanted.clip else "with compute = 'fp16'"
        raise FullshardError(
            f"backlog = {wanted.fix['backlog']} has no effect {why}: all gradients wait for their norm; leave one of them out"
        )


def strategies(wanted: Wanted) -> Iterator[list[Family]]:
    """A strategy's families, whose micro-batches grow."""
    axes = {tensor: list(_shapes(wanted, wanted.cluster.devices // tensor)) for tensor in _tensor_axes(wanted)}
    if not any(axes.values()):
        ranks = wanted.cluster.devices // max(axes)
        raise FullshardError(
            f"a global batch of {wanted.global_batch} cannot be cut for {ranks} data ranks"
            f"{_fixed(wanted, 'micro_batch', 'accumulate')}; give a multiple of {ranks * wanted.fix.get('micro_batch', 1)}"
        )
    made = 0
    refused: list[FullshardError] = []
    for tensor, shapes in axes.items():
        for name, own in _strategies(wanted, wanted.cluster.devices // tensor, tensor):
            first = _family(wanted, name, own, tensor, refused) if shapes else []
            families = [_shaped(wanted, name, own, first, shape, refused) for shape in shapes]
            made += sum(map(len, families))
            yield [family for family in families if family]
    if not made and refused:
        raise refused[0]
    if not made:
        raise FullshardError(f"no plan can be made with {_fixed(wanted, *wanted.fix).strip(' ()')}; fix less")


def _tensor_axes(wanted: Wanted) -> list[int]:
    """The one that is fixed; else none, and those that the model was traced for, within a node. A split head has no chunked
    loss."""
    devices, costs = wanted.cluster.devices, wanted.description.costs
    if (fixed := wanted.fix.get("tensor")) is not None:
        if fixed < 1 or devices % fixed:
            raise FullshardError(f"tensor = {fixed} must divide the {devices} devices")
        return [fixed]
    split = costs.split if costs else {}
    whole = min(wanted.cluster.node.devices, devices)
    return [1, *[n for n, part in split.items() if whole % n == 0 and (wanted.loss == "plain" or part.vocabulary)]]


def _fixed(wanted: Wanted, *names: str) -> str:
    given = [f"{n} = {wanted.fix[n]!r}" for n in names if n in wanted.fix]
    return f" ({', '.join(given)})" if given else ""


def _shapes(wanted: Wanted, ranks: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, accumulate) whose product is each rank's share of the global batch."""
    if wanted.global_batch % ranks:
        return
    share = wanted.global_batch // ranks
    for micro in (n for n in range(1, min(share, 32) + 1) if share % n == 0):
        accumulate = share // micro
        if wanted.fix.get("micro_batch", micro) == micro and wanted.fix.get("accumulate", accumulate) == accumulate:
            yield micro, accumulate


def _strategies(wanted: Wanted, ranks: int, tensor: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and own arguments: hybrid and hpz by node and by a few of them."""
    fixed = wanted.fix.get("strategy")
    if fixed is not None and fixed not in STRATEGIES:
        raise FullshardError(f"unknown strategy {fixed!r}{nearest(fixed, list(STRATEGIES))} (known: {', '.join(STRATEGIES)})")
    node = wanted.cluster.node.devices // tensor or 1
    groups = [n for n in (node, 2 * node, 4 * node, 8 * node) if 1 < n < ranks and ranks % n == 0]
    options: list[tuple[str, dict[str, Any]]] = [(n, {}) for n in ("ddp", "zero1", "zero2", "zero3")]
    options += [("hybrid", {"replicate": ranks // n}) for n in groups] + [("hpz", {"reshard": n}) for n in groups]
    if fixed == "hybrid" and "replicate" in wanted.fix:
        options = [("hybrid", {"replicate": wanted.fix["replicate"]})]
    if fixed == "hpz" and "reshard" in wanted.fix:
        options = [("hpz", {"reshard": wanted.fix["reshard"]})]
    for name, own in options:
        if fixed in (None, name) and all(wanted.fix.get(k, v) == v for k, v in own.items()):
            yield name, own


def _shaped(
    wanted: Wanted, name: str, own: dict[str, Any], plans: list[Plan], shape: tuple[int, int], refused: list[FullshardError]
) -> Family:
    """Plans with this micro-batch and as many of them, and what they are called."""
    micro, accumulate = shape
    try:
        batch = Batch(micro, wanted.sequence, accumulate, wanted.fix.get("sync", "every"))
        shaped = [replace(plan, batch=batch) for plan in plans]
    except FullshardError as error:
        refused.append(error)
        return []
    return [(_label(name, own, plan), plan) for plan in shaped]


def _family(wanted: Wanted, name: str, own: dict[str, Any], tensor: int, refused: list[FullshardError]) -> list[Plan]:
    """Plans of a strategy that differ in remat."""
    found, fix = [], wanted.fix
    blocks = any(u.kind == "block" for u in wanted.description.units)
    for remat in REMATS if blocks else ("none",):
        if fix.get("remat", remat) != remat:
            continue
        depth = fix.get("prefetch", 1)
        try:
            plan = choose(
                name,
                wanted.description,
                devices=wanted.cluster.devices,
                tensor=tensor,
                **own,
                precision=precision_of(wanted),
                batch=Batch(1, wanted.sequence),
                prefetch=Prefetch(depth, depth),
                remat=remat,
                compile=fix.get("compile", blocks and wanted.cluster.device.kind == "cuda"),
                home=_least_away(wanted.homes),
                **{key: fix[key] for key in OF_UPDATES if key in fix},
            )
        except FullshardError as error:
            refused.append(error)
            continue
        found.append(plan)
    return found


def _least_away(fixed: dict[str, Any]) -> Home:
    """As much on the device as may be: where parameters rest on disk, their state has left it."""
    return Home(**{"optimizer": "host" if fixed.get("params") == "disk" else "device", **fixed})


def precision_of(wanted: Wanted) -> Precision:
    gpu = wanted.cluster.device.kind != "cpu"
    given = {k: wanted.fix[k] for k in ("compute", "reduce", "master") if k in wanted.fix}
    return Precision(**{"compute": "bf16" if gpu else "fp32", **given})


def _label(name: str, own: dict[str, Any], plan: Plan) -> str:
    mesh = f" {plan.mesh.replicate}×{plan.mesh.shard}" if name == "hybrid" else f" {own['reshard']}" if name == "hpz" else ""
    mesh += f", tensor {plan.mesh.tensor}" if plan.mesh.tensor > 1 else ""
    remat = next((u.remat for u in plan.units if u.remat != "none"), "none")
    away = home_words(plan)
    return f"{name}{mesh}, {plan.batch.micro_batch} × {plan.batch.accumulate} rows, remat {remat}{f', {away}' if away else ''}"
