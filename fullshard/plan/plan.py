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
from typing import Any, Self

from fullshard.base.errors import FullshardError, nearest
from fullshard.base.reading import parse_json, read_text
from fullshard.plan.choices import (
    Batch,
    DType,
    Float8,
    Home,
    HomeName,
    Kernels,
    Layout,
    Mesh,
    PlanError,
    Precision,
    Prefetch,
    Remat,
    Split,
    SplitRules,
    Sync,
    Unit,
    Wire,
    WireFormat,
    WireMemory,
    check_positive_integer,
    checked_share,
    checked_splits,
    refuse_twice,
)
from fullshard.plan.plan_json import PARTS, VERSION, plan_arguments, plan_data
from fullshard.plan.plan_text import plan_differences, plan_text
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


@dataclass(frozen=True)
class Plan:
    """How a model is sharded: complete, versioned, hashable, JSON both ways.

    `split`: how the tensor axis splits the modules whose paths match a pattern, before the rules for Llama-like models: by
    `output` or `input` features, by `vocabulary`, or not at all (`whole`).

    Three choices matter only to optimizer state that rests off the device. It is updated in pieces.
    `staging`: pieces of state that are on the device at a time. `cpu_share`: the share of pieces that the host's cores
    update, from 0 to 1; with None the engine measures the best. `backlog`: pieces whose gradients may wait on the device
    while backward runs; None for no limit. With clipping all gradients wait for the norm.
    """

    mesh: Mesh
    units: tuple[Unit, ...]
    precision: Precision = field(default_factory=Precision)
    batch: Batch = field(default_factory=Batch)
    prefetch: Prefetch = field(default_factory=Prefetch)
    compile: bool = False
    staging: int = STAGING
    cpu_share: float | None = None
    backlog: int | None = None
    split: SplitRules = ()
    wire: Wire = field(default_factory=Wire)
    kernels: Kernels = field(default_factory=Kernels)

    def __post_init__(self) -> None:
        for name, kind in PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise PlanError(f"plan.{name} must be a {kind.__name__}, not {getattr(self, name)!r}")
        if not isinstance(self.units, tuple) or not self.units or not all(isinstance(u, Unit) for u in self.units):
            raise PlanError("plan.units must be a non-empty tuple of Unit")
        if not isinstance(self.compile, bool):
            raise PlanError(f"plan.compile must be true or false, not {self.compile!r}")
        object.__setattr__(self, "split", checked_splits(self.split))
        if self.split and self.mesh.tensor == 1:
            raise PlanError(f"split ({self.split[0][0]!r} …) has no effect with mesh.tensor = 1; leave it out")
        check_positive_integer("plan.staging", self.staging)
        if self.cpu_share is not None:
            object.__setattr__(self, "cpu_share", checked_share("plan.cpu_share", self.cpu_share))
        if self.backlog is not None:
            check_positive_integer("plan.backlog", self.backlog)
        refuse_twice("unit", [u.name for u in self.units])
        refuse_twice("module", [m for u in self.units for m in u.modules])
        for unit in self.units:
            self._check_reshard(unit)
        self._check_prefetch()
        self._check_wire()
        self._check_kernels()
        self._check_experts()
        self._check_float8()
        self._check_output()
        if self.batch.sync == "last" and all(u.layout == "optimizer" for u in self.units):
            raise PlanError("batch.sync = 'last' has no effect: layout 'optimizer' reduces after the last anyway; write 'every'")
        self._check_updates()

    @property
    def offloads_state(self) -> bool:
        """True if any optimizer state rests off the device."""
        return any(u.home.optimizer != "device" for u in self.units)

    def _check_prefetch(self) -> None:
        """Refuse depths where nothing is gathered. `prefetch = 2` for both directions is well where only forward gathers."""
        if self.prefetch != Prefetch() and all(u.layout == "replicated" for u in self.units):
            raise PlanError(
                f"prefetch ({self.prefetch}) has no effect: every unit of this plan is replicated, so nothing is gathered"
            )
        depth = self.prefetch.backward
        if depth not in (1, self.prefetch.forward) and not any(u.reshard for u in self.units):
            raise PlanError(
                f"prefetch.backward = {depth} has no effect: every unit stays gathered from forward to backward; leave it out"
            )

    def _check_updates(self) -> None:
        """Refuse choices about offloaded state if there is none."""
        staging = None if self.staging == STAGING else self.staging
        for name, value in (("staging", staging), ("cpu_share", self.cpu_share), ("backlog", self.backlog)):
            if value is not None and not self.offloads_state:
                raise PlanError(
                    f"{name} = {value:g} has no effect: the optimizer state of every unit rests on the device; "
                    f"leave it out, or give a unit home.optimizer = 'host'"
                )

    def _check_kernels(self) -> None:
        """Refuse a choice of the update's kernel if none of the plan's updates has one."""
        why = ""
        if all(u.home.params != "device" or u.home.optimizer != "device" for u in self.units):
            why = "the state of every unit rests off the device"
        elif self.precision.low_bit:
            why = f"low-bit state ({self.precision}) has an update of its own"
        elif self.precision.master != "fp32":
            why = f"only fp32 masters have a kernel beside torch's, and this one is {self.precision.master}"
        if self.kernels.update != "auto" and why:
            raise PlanError(f"kernels.update = {self.kernels.update!r} has no effect: {why}; leave it out")

    def _check_wire(self) -> None:
        """Refuse choices for collectives if there are none, and quantised ones if the loss is scaled."""
        if self.wire == Wire():
            return
        if self.mesh.shard == 1 or all(u.layout == "replicated" for u in self.units):
            why = "mesh.shard = 1" if self.mesh.shard == 1 else "every unit of this plan is replicated"
            raise PlanError(f"wire ({self.wire}) has no effect: {why}, so nothing is gathered or reduced to shards; leave it out")
        for part in ("compute", "reduce"):
            if getattr(self.precision, part) == "fp16" and not self.wire.is_plain:
                raise PlanError(
                    f"wire ({self.wire}) does not work with precision.{part} = 'fp16'; write 'bf16', or leave wire out"
                )

    def _check_experts(self) -> None:
        """Refuse an expert axis without experts, and experts without an axis."""
        spread = [u for u in self.units if u.layout == "experts"]
        if self.mesh.expert > 1 and not spread:
            raise PlanError(
                f"mesh.expert = {self.mesh.expert} has no effect: no unit has layout 'experts'; describe the model with "
                "experts=True, or write 1"
            )
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
