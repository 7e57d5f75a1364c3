"""The plan: how a model is sharded, as one immutable value.

It decides which bytes rest where and what moves when. It holds no ranks, no paths and no hyper-parameters. Engines, planner
and checkpoints read it. Standard library only.
"""

import dataclasses
import fnmatch
import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from fullshard.base.errors import FullshardError, nearest
from fullshard.base.reading import parse_json, read_text
from fullshard.plan.choice import Part, PlanError, check_choices, checked_share, choice, choices_of
from fullshard.plan.choices import (
    AWAY,
    ON_DEVICE,
    UPDATES_OF_XLA,
    Batch,
    DType,
    Float8,
    Kernels,
    Mesh,
    Precision,
    Prefetch,
    Sync,
    Wire,
    WireFormat,
    WireMemory,
)
from fullshard.plan.plan_json import PARTS, VERSION, plan_arguments, plan_data
from fullshard.plan.plan_text import plan_differences, plan_text
from fullshard.plan.unit_choices import Home, HomeName, Layout, Remat, Split, SplitRules, Unit, checked_splits, refuse_twice
from fullshard.plan.update_pieces import STAGING, TOLD

__all__ = [
    "VERSION",
    "Batch",
    "DType",
    "Float8",
    "Home",
    "HomeName",
    "Kernels",
    "Layout",
    "Mesh",
    "Plan",
    "PlanError",
    "Precision",
    "Prefetch",
    "Remat",
    "Split",
    "SplitRules",
    "Sync",
    "Unit",
    "Wire",
    "WireFormat",
    "WireMemory",
]


def _resident_state(plan: "Plan") -> str:
    return "" if plan.offloads_state else ON_DEVICE


@dataclass(frozen=True)
class Plan(Part):
    """How a model is sharded: complete, versioned, hashable, JSON both ways.

    `staging`, `cpu_share` and `backlog` matter only to optimizer state that rests off the device, which is updated in pieces.
    """

    NAME: ClassVar = "{}"

    mesh: Mesh
    units: tuple[Unit, ...]
    precision: Precision = field(default_factory=Precision)
    batch: Batch = field(default_factory=Batch)
    prefetch: Prefetch = field(default_factory=Prefetch)
    compile: bool = choice(False, "Compile each block.", open=True)
    staging: int = choice(
        STAGING,
        "Pieces of offloaded state that are on the device at a time during updates.",
        recipe="home.staging",
        open=True,
        needs=AWAY,
        idle_in_plan=_resident_state,
        limits=UPDATES_OF_XLA,
    )
    cpu_share: float | None = choice(
        None,
        "Share of the offloaded pieces that the CPU updates, from 0 to 1. Measured at the start unless given.",
        recipe="home.cpu_share",
        unset="measured",
        open=True,
        needs=AWAY,
        idle_in_plan=_resident_state,
        limits=UPDATES_OF_XLA,
    )
    backlog: int | None = choice(
        None,
        "Pieces whose gradients may wait on the device during backward, in steps without clipping. By default any number.",
        recipe="home.backlog",
        unset="any",
        open=True,
        needs=AWAY,
        idle_in_plan=_resident_state,
        limits=UPDATES_OF_XLA,
    )
    split: SplitRules = choice(
        (),
        "How the tensor axis splits modules: a pattern of paths, and `output` or `input` features, `vocabulary` or `whole`; the "
        "first that matches holds, Llama-like names need none.",
        name="",
    )
    wire: Wire = field(default_factory=Wire, metadata={"absent": True})
    kernels: Kernels = field(default_factory=Kernels, metadata={"absent": True})

    def __post_init__(self) -> None:
        for name, kind in PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise PlanError(f"plan.{name} must be a {kind.__name__}, not {getattr(self, name)!r}")
        if not isinstance(self.units, tuple) or not self.units or not all(isinstance(u, Unit) for u in self.units):
            raise PlanError("plan.units must be a non-empty tuple of Unit")
        object.__setattr__(self, "split", checked_splits(self.split))
        if self.split and self.mesh.tensor == 1:
            raise PlanError(f"split ({self.split[0][0]!r} …) has no effect with mesh.tensor = 1; leave it out")
        check_choices(self, "plan.")
        if self.cpu_share is not None:
            object.__setattr__(self, "cpu_share", checked_share("plan.cpu_share", self.cpu_share))
        refuse_twice("unit", [u.name for u in self.units])
        refuse_twice("module", [m for u in self.units for m in u.modules])
        for unit in self.units:
            self._check_reshard(unit)
        self._refuse_idle()
        self._check_wire()
        self._check_experts()
        self._check_float8()
        self._check_output()

    def _refuse_idle(self) -> None:
        """Refuse parts and choices that have no effect beside the others."""
        parts = {name: getattr(self, name) for name in PARTS}
        for name, part in parts.items():
            if part != type(part)() and (end := part.idle_in(self)):
                raise PlanError(f"{name} ({part}) has no effect{end}")
        for part in (*parts.values(), self):
            for row in choices_of(type(part)):
                row.refuse_idle(part, self)

    @property
    def offloads_state(self) -> bool:
        """True if any optimizer state rests off the device."""
        return any(u.home.optimizer != "device" for u in self.units)

    def _check_wire(self) -> None:
        """Refuse quantised messages if the loss is scaled."""
        for part in ("compute", "reduce"):
            if getattr(self.precision, part) == "fp16" and not self.wire.is_plain:
                raise PlanError(
                    f"wire ({self.wire}) does not work with precision.{part} = 'fp16'; write 'bf16', or leave wire out"
                )

    def _check_experts(self) -> None:
        """Refuse experts without an axis for them."""
        spread = [u for u in self.units if u.layout == "experts"]
        for unit in spread:
            if self.mesh.expert == 1:
                raise PlanError(
                    f"unit {unit.name}: layout = 'experts' needs mesh.expert, the ranks that share them; or write 'sharded'"
                )
            if self.mesh.expert == self.mesh.shard and unit.reshard is not False:
                raise PlanError(
                    f"unit {unit.name}: reshard = {unit.reshard} has no effect: the expert axis is the whole shard axis, so "
                    "nothing is gathered; write False"
                )
        if spread and self.compile:
            raise PlanError("compile = true does not work with an expert axis yet; write false")

    def _check_output(self) -> None:
        """Refuse outputs in a dtype that the next module cannot take: inputs are cast only where compute is not the master's
        dtype, as then parameters are, too."""
        kinds = self.precision
        if kinds.output in (None, kinds.compute) or kinds.compute != kinds.master or sum(len(u.modules) for u in self.units) == 1:
            return
        fix = "master = 'fp32'" if kinds.master == "bf16" else f"compute = {kinds.output!r}"
        raise PlanError(
            f"precision.output = {kinds.output!r} does not work with compute = master = {kinds.compute!r}: the inputs of units "
            f"are then not cast back; write {fix}, or leave output out"
        )

    def _check_float8(self) -> None:
        """Refuse float8 where linear layers are split or sent along an axis, and two formats for one gather."""
        kind = self.precision.float8
        if kind is None:
            return
        for axis in ("tensor", "expert"):
            if (ranks := getattr(self.mesh, axis)) > 1:
                raise PlanError(
                    f"precision.float8 = {kind!r} does not work with mesh.{axis} = {ranks} yet; write {axis} = 1, or leave it out"
                )
        if kind == "tensorwise" and self.wire.gather != "plain":
            raise PlanError(
                f"precision.float8 = 'tensorwise' gathers weights in float8 already, so wire.gather = {self.wire.gather!r} "
                "cannot be applied; write wire.gather = 'plain', or precision.float8 = 'rowwise'"
            )

    def _check_reshard(self, unit: Unit) -> None:
        if isinstance(unit.reshard, bool):
            return
        spread = unit.layout == "experts"
        axis, shard = (
            "mesh.shard / mesh.expert" if spread else "mesh.shard",
            self.mesh.shard // (self.mesh.expert if spread else 1),
        )
        if unit.reshard >= shard or shard % unit.reshard:
            raise PlanError(
                f"unit {unit.name}: reshard = {unit.reshard} must divide {axis} = {shard} and be smaller than it; "
                "write True to free everything or False to keep it"
            )

    def unit_of(self, parameter: str) -> Unit | None:
        """The unit whose module is the innermost one around the parameter; None if there is none."""
        module = parameter
        while module:
            module = module.rpartition(".")[0]
            if module in self._by_module:
                return self._by_module[module]
        return None

    @cached_property
    def _by_module(self) -> dict[str, Unit]:
        return {module: unit for unit in self.units for module in unit.modules}

    @property
    def offloaded_gradients(self) -> DType:
        """The dtype in which gradients of offloaded units wait for their update.

        The reduce dtype, but never wider than the master. The master's dtype if several reductions are added up. The compute
        dtype for one micro-batch on one device: nothing is added up there, so it is exact.
        """
        if self.precision.master != "fp32" or (self.batch.accumulate > 1 and self.batch.sync == "every"):
            return self.precision.master
        alone = self.mesh.devices == 1 and self.batch.accumulate == 1 and self.precision.reduce == "fp32"
        return self.precision.compute if alone else self.precision.reduce

    @property
    def keeps_computed_gradients(self) -> bool:
        """True if gradients of resident units can wait for their update as they were computed, in bf16: on one device with one
        micro-batch nothing is added up, so it is exact. An engine does so where its update takes them."""
        alone = self.mesh.data == 1 and self.batch.accumulate == 1
        return alone and (self.precision.compute, self.precision.reduce, self.precision.master) == ("bf16", "fp32", "fp32")

    def packs(self, home: Home, slots: int) -> bool:
        """True if only the low 16 bits of the fp32 master are stored; its high half is the bf16 parameter.

        `slots`: tensors of optimizer state for each parameter. Packing needs two, as a bit of the fp32 second
        moment is used.
        """
        kinds = (self.precision.compute, self.precision.master, home.optimizer)
        whole = home.params != "disk" and slots == 2 and not self.precision.low_bit
        return kinds == ("bf16", "fp32", "host") and whole

    def pairs(self, home: Home, slots: int) -> bool:
        """True if the parameters on the host are stored in the half of the master's memory that packing frees."""
        return home.params == "host" and self.packs(home, slots)

    def bytes_in_parameter(self, home: Home, slots: int) -> int:
        """Bytes of an element of state that need not be copied to the device, as the parameter there holds them."""
        return TOLD if home.params == "device" and self.packs(home, slots) else 0

    # -- the other forms of a plan ---------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return plan_data(self)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """The plan that `to_dict` wrote; anything unknown, missing or of another version is refused."""
        return cls(**plan_arguments(cls, data))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            data = parse_json(text)
        except FullshardError as error:
            raise PlanError(error) from None
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            text = read_text(path, "plan")
        except FullshardError as error:
            raise PlanError(error) from None
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    @cached_property
    def digest(self) -> str:
        """A hash of the plan that is the same in every process and on every machine."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    # -- variations --------------------------------------------------------------------------------

    def change(self, pattern: str, **choices: Any) -> Self:
        """This plan with other choices for the units whose name matches `pattern` (shell wildcards).

        >>> plan.change("*.layers.*", remat="full").change("embed", layout="replicated")
        """
        names = [u.name for u in self.units]
        hit = {n for n in names if fnmatch.fnmatchcase(n, pattern)}
        if not hit:
            raise PlanError(f"no unit matches {pattern!r}; the units are {', '.join(names)}")
        known = [f.name for f in dataclasses.fields(Unit) if f.name not in ("name", "modules")]
        for key in choices:
            if key not in known:
                raise PlanError(f"a unit has no choice {key!r}{nearest(key, known)} (known: {', '.join(known)})")
        if choices.get("layout", "sharded") not in ("sharded", "experts"):
            choices.setdefault("reshard", False)
        return dataclasses.replace(
            self, units=tuple(dataclasses.replace(u, **choices) if u.name in hit else u for u in self.units)
        )

    # -- for people ----------------------------------------------------------------------------------

    def diff(self, other: "Plan") -> list[str]:
        """What differs from here to `other`, a sentence a difference; empty when nothing does."""
        return plan_differences(self, other)

    def __str__(self) -> str:
        return plan_text(self)
