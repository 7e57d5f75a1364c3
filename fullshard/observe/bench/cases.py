"""The cases of a benchmark: fullshard's own, and those of its peers, each a recipe that is checked and predicted."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.status import say, unsaid
from fullshard.engine.bench_protocols import BenchEngine
from fullshard.engine.engine import Engine
from fullshard.observe.bench.axes import Axis, Choices, product
from fullshard.observe.bench.base_recipe import Base, Tree, with_choices
from fullshard.observe.bench.case_process import Spec
from fullshard.planner.wire_bytes import wire_bytes
from fullshard.runs.prepare.describe_model import describe_costs
from fullshard.runs.prepare.prepare import Prepared, prepare
from fullshard.runs.prepare.recipe_plan import expected_of, planned_loss
from fullshard.runs.recipe.recipe import make_recipe

OWN = "fullshard"
TITLES = {  # of peers, for tables
    "fully_shard": "bare fully_shard",
    "ddp": "torch DDP",
    "fsdp1": "FSDP1",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "megatron-fsdp": "Megatron-FSDP",
    "plain": "plain JAX",
}
# What a peer takes over of a case. How it shards and where it keeps bytes is its own.
PEER_KEYS = (
    *("model.name", "data.sequence", "train.micro_batch", "train.global_batch"),
    *("plan.compute", "plan.reduce", "plan.remat", "plan.remat_every", "plan.compile"),
)


@dataclass(frozen=True)
class Predicted:
    """What the planner says of a case: bytes and seconds of a rank, and bytes that it sends in a step."""

    allocated: int
    reserved: int | None
    seconds: float
    sent: float | None
    mfu: float | None
    fits: bool


@dataclass(frozen=True)
class Case:
    """`choices`: what it tries, by `section.key`. `refused`: why it cannot run, in a sentence."""

    system: str
    choices: Choices
    spec: Spec
    predicted: Predicted | None = None
    refused: str | None = None

    @property
    def key(self) -> str:
        """The same for the same case, whatever else a benchmark tries."""
        text = json.dumps(asdict(self.spec), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def label(self, shown: Sequence[Axis]) -> str:
        """Its values of the axes that differ between cases, in a few words."""
        return label(self.system, self.choices, shown)


def label(system: str, choices: Choices, shown: Sequence[Axis]) -> str:
    """A system's name, unless it is fullshard itself, and the values of these axes."""
    words = [value_text(axis, choices[axis.key]) for axis in shown if axis.key in choices]
    title = [] if system == OWN and words else [TITLES.get(system, system)]
    return " ".join([*title, *words])


def value_text(axis: Axis, value: Any) -> str:
    """A value as a word. Numbers, switches and homes say what they are of."""
    if isinstance(value, bool):
        return axis.name if value else f"no {axis.name}"
    bare = axis.key in ("plan.strategy", "model.name", "plan.compute")
    return str(value) if bare else f"{axis.name}={value}"


@dataclass(frozen=True)
class Settings:
    """What all cases share."""

    engine: str
    ranks: int
    steps: int
    warmup: int
    limit: int | None
    versions: dict[str, str]


def make_cases(base: Base, axes: list[Axis], peers: Sequence[str], settings: Settings, disk: Path) -> list[Case]:
    """All cases, unchecked: fullshard's first, then each peer's. `disk`: for homes there, where the recipe names no directory."""
    shared = [axis for axis in axes if axis.key in PEER_KEYS]
    cases = [_case(OWN, base, choices, settings, disk) for choices in product(axes, base.choices())]
    for peer in peers:
        cases += [_case(peer, base, choices, settings, disk) for choices in product(shared, base.choices())]
    return cases


def _case(system: str, base: Base, choices: Choices, settings: Settings, disk: Path) -> Case:
    tree = with_choices(base.tree, choices, disk)
    peer = None if system == OWN else system
    if peer:
        tree = _for_peer(tree)
    s = settings
    spec = Spec(s.engine, s.ranks, tree, peer, s.steps, s.warmup, s.limit, s.versions)
    return Case(system, choices, spec)


def _for_peer(tree: Tree) -> Tree:
    """The recipe of a peer: units, precision, remat and batch of the case, nothing that only fullshard has."""
    kept = {key.partition(".")[2] for key in PEER_KEYS if key.startswith("plan.")}
    plan = {key: value for key, value in tree.get("plan", {}).items() if key in kept}
    others = {name: table for name, table in tree.items() if name not in ("home", "disk", "plan")}
    return others | {"plan": plan | {"strategy": "zero3"}}


# -- before any starts -----------------------------------------------------------------------------------------


def checked(cases: list[Case], engine: Engine[Any, Any], bench: BenchEngine) -> list[Case]:
    """Every case with its prediction, or with the reason why it cannot run."""
    say(f"checking {len(cases)} cases")
    with unsaid():  # each would say what it does
        return [_checked(case, engine, bench) for case in cases]


def _checked(case: Case, engine: Engine[Any, Any], bench: BenchEngine) -> Case:
    """The case with the planner's numbers, or with the reason why it cannot run."""
    try:
        if case.spec.peer and (fault := bench.peer_fault(case.spec.peer) or _peer_refusal(case.spec.recipe)):
            return replace(case, refused=fault)
        prepared = prepare(make_recipe(case.spec.recipe, "the case"), case.spec.ranks, engine)
    except FullshardError as error:
        return replace(case, refused=str(error).removeprefix("the case: "))
    return replace(case, predicted=None if case.spec.peer else predict(prepared, engine))


def _peer_refusal(tree: Tree) -> str | None:
    """Why no peer trains this recipe."""
    data, model = tree.get("data", {}), tree.get("model", {})
    if data.get("objective", "causal") != "causal" or data.get("boundaries") == "attention":
        return "peers are measured on causal language models whose batches hold tokens alone"
    if tree.get("lora") or model.get("call"):
        return "peers are measured on whole models that are called with their tokens; leave lora and model.call out"
    return None


def predict(prepared: Prepared, engine: Engine[Any, Any]) -> Predicted | None:
    """The planner's numbers; None for a model whose costs are not known."""
    recipe, plan, description, estimate = prepared.recipe, prepared.plan, prepared.description, prepared.estimate
    if estimate is None and engine.model.trace_costs is not None and recipe.data.objective == "causal" and plan.mesh.tensor == 1:
        description = describe_costs(recipe, prepared.model, engine, plan.precision.compute)
        estimate = expected_of(recipe, plan, description, prepared.cluster)
    if estimate is None or description is None:
        return None
    sent = wire_bytes(plan, description, loss=planned_loss(recipe), clip=recipe.optim.clip is not None).total
    return Predicted(
        estimate.device.allocated_bytes, estimate.device.reserved_bytes, estimate.step_seconds, sent, estimate.mfu, estimate.fits
    )
