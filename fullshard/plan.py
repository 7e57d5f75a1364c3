"""The plan: how a model is sharded, as one immutable value.

Everything that decides what bytes rest where and what moves when is in here, and nothing else: no
ranks, no paths, no hyper-parameters. Both engines, the planner and the checkpoints read it. Standard
library only.
"""

import dataclasses
import fnmatch
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

from fullshard.errors import FullshardError, nearest
from fullshard.reading import LARGEST_INTEGER, parse_json, read_text
from fullshard.text import spans, table
from fullshard.update_pieces import STAGING, TOLD

VERSION = 4  # 1 had no staging, 2 no cpu_share, 3 no backlog

Place = Literal["device", "host", "disk"]
Layout = Literal["replicated", "optimizer", "sharded"]
Remat = Literal["none", "selective", "full"]
DType = Literal["fp32", "bf16", "fp16"]
Sync = Literal["every", "last"]


class PlanError(FullshardError):
    """A plan, or a field of one, that makes no sense."""


@dataclass(frozen=True)
class Mesh:
    """`replicate × shard × tensor` devices."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in ("replicate", "shard", "tensor"):
            _positive(f"mesh.{axis}", getattr(self, axis))

    @property
    def devices(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """How many different batches are in flight: ranks of one tensor group share theirs."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return f"{self.replicate}×{self.shard}×{self.tensor}"


@dataclass(frozen=True)
class Home:
    """Where a unit's bytes rest when they are not being worked on."""

    params: Place = "device"
    optimizer: Place = "device"
    activations: Place = "device"

    def __post_init__(self) -> None:
        for kind in ("params", "optimizer", "activations"):
            _one_of(f"home.{kind}", getattr(self, kind), get_args(Place))

    def __str__(self) -> str:
        places = (self.params, self.optimizer, self.activations)
        return places[0] if len(set(places)) == 1 else "/".join(places)


@dataclass(frozen=True)
class Precision:
    """`compute`: gathered parameters and activations; `reduce`: gradients on the wire; `master`: the
    copy at rest that the optimizer updates; `output`: the dtype every unit casts its output to, if any."""

    compute: DType = "fp32"
    reduce: DType = "fp32"
    master: DType = "fp32"
    output: DType | None = None

    def __post_init__(self) -> None:
        for part in ("compute", "reduce"):
            _one_of(f"precision.{part}", getattr(self, part), get_args(DType))
        _one_of("precision.master", self.master, ("fp32", "bf16"))
        if self.output is not None:
            _one_of("precision.output", self.output, get_args(DType))

    def __str__(self) -> str:
        text = f"compute {self.compute}, reduce {self.reduce}, master {self.master}"
        return text if self.output is None else f"{text}, output {self.output}"


@dataclass(frozen=True)
class Batch:
    """The shape of one rank's work in a step: `accumulate` micro-batches of `micro_batch` × `sequence`.

    `sync` says when gradients cross the wire: after `every` micro-batch (the least memory), or only
    after the `last` one (the least traffic; whole gradients wait in memory until then).
    """

    micro_batch: int = 1
    sequence: int = 1024
    accumulate: int = 1
    sync: Sync = "every"

    def __post_init__(self) -> None:
        for part in ("micro_batch", "sequence", "accumulate"):
            _positive(f"batch.{part}", getattr(self, part))
        _one_of("batch.sync", self.sync, get_args(Sync))
        if self.sync == "last" and self.accumulate == 1:
            raise PlanError("batch.sync = 'last' has no effect with batch.accumulate = 1; write 'every', or accumulate more")

    def __str__(self) -> str:
        moment = "every micro-batch" if self.sync == "every" else "the last micro-batch"
        return f"{self.micro_batch} × {self.sequence} tokens, {self.accumulate} accumulated, gradients reduced after {moment}"


@dataclass(frozen=True)
class Prefetch:
    """How many units ahead parameters are gathered; 1 is the overlap of one gather with one compute."""

    forward: int = 1
    backward: int = 1

    def __post_init__(self) -> None:
        for part in ("forward", "backward"):
            _positive(f"prefetch.{part}", getattr(self, part))

    def __str__(self) -> str:
        return f"{self.forward} forward, {self.backward} backward"


@dataclass(frozen=True)
class Unit:
    """Modules that gather, compute and free together.

    `layout`: `sharded` splits parameters, gradients and optimizer state over the mesh's shard axis;
    `optimizer` splits the state at rest but keeps parameters and gradients whole for the length of a
    step (ZeRO-1); `replicated` keeps everything whole on every rank.
    `reshard`: when gathered parameters are freed: True after forward (and gathered again for backward),
    False after backward, an int after forward but only down to that many ranks.
    """

    name: str
    modules: tuple[str, ...]
    layout: Layout = "sharded"
    reshard: bool | int = True
    remat: Remat = "none"
    home: Home = field(default_factory=Home)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise PlanError(f"unit.name must be a non-empty string, not {self.name!r}")
        if not isinstance(self.modules, tuple) or not self.modules or not all(isinstance(m, str) for m in self.modules):
            raise PlanError(f"unit {self.name}: modules must be a non-empty tuple of module names, not {self.modules!r}")
        _one_of(f"unit {self.name}: layout", self.layout, get_args(Layout))
        _one_of(f"unit {self.name}: remat", self.remat, get_args(Remat))
        if not isinstance(self.home, Home):
            raise PlanError(f"unit {self.name}: home must be a Home, not {self.home!r}")
        if not isinstance(self.reshard, int):  # bool is an int
            raise PlanError(f"unit {self.name}: reshard must be True, False or a number of ranks, not {self.reshard!r}")
        if not isinstance(self.reshard, bool) and self.reshard < 2:
            raise PlanError(f"unit {self.name}: reshard = {self.reshard} must be at least 2 ranks; write True or False instead")
        if self.layout != "sharded" and self.reshard is not False:
            raise PlanError(f"unit {self.name}: reshard = {self.reshard} has no effect with layout '{self.layout}'; write False")


@dataclass(frozen=True)
class Plan:
    """How a model is sharded: complete, versioned, hashable, JSON both ways.

    `staging`: pieces of optimizer state that are on the device at a time while those that rest elsewhere are updated.
    `cpu_share`: of the pieces that rest elsewhere, how many the host's cores update, from 0 to 1; the engine measures what is
    best where it is None. `backlog`: pieces whose gradients may wait on the device for their update while backward runs, no
    matter how many where it is None; where gradients are clipped, all of them wait for the norm.
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

    def __post_init__(self) -> None:
        for name, kind in (("mesh", Mesh), ("precision", Precision), ("batch", Batch), ("prefetch", Prefetch)):
            if not isinstance(getattr(self, name), kind):
                raise PlanError(f"plan.{name} must be a {kind.__name__}, not {getattr(self, name)!r}")
        if not isinstance(self.units, tuple) or not self.units or not all(isinstance(u, Unit) for u in self.units):
            raise PlanError("plan.units must be a non-empty tuple of Unit")
        if not isinstance(self.compile, bool):
            raise PlanError(f"plan.compile must be true or false, not {self.compile!r}")
        _positive("plan.staging", self.staging)
        if self.cpu_share is not None:
            object.__setattr__(self, "cpu_share", _share("plan.cpu_share", self.cpu_share))
        if self.backlog is not None:
            _positive("plan.backlog", self.backlog)
        _refuse_twice("unit", [u.name for u in self.units])
        _refuse_twice("module", [m for u in self.units for m in u.modules])
        for unit in self.units:
            self._check_reshard(unit)
        if self.prefetch != Prefetch() and all(u.layout == "replicated" for u in self.units):
            raise PlanError(
                f"prefetch ({self.prefetch}) has no effect: every unit of this plan is replicated, so nothing is gathered"
            )
        if self.batch.sync == "last" and all(u.layout == "optimizer" for u in self.units):
            raise PlanError("batch.sync = 'last' has no effect: layout 'optimizer' reduces after the last anyway; write 'every'")
        self._check_updates()

    @property
    def stages(self) -> bool:
        """Whether any optimizer state rests away from the device."""
        return any(u.home.optimizer != "device" for u in self.units)

    def _check_updates(self) -> None:
        """Choices about state that rests elsewhere, where none does."""
        staging = None if self.staging == STAGING else self.staging
        for name, value in (("staging", staging), ("cpu_share", self.cpu_share), ("backlog", self.backlog)):
            if value is not None and not self.stages:
                raise PlanError(
                    f"{name} = {value:g} has no effect: the optimizer state of every unit rests on the device; "
                    f"leave it out, or give a unit home.optimizer = 'host'"
                )

    def _check_reshard(self, unit: Unit) -> None:
        if isinstance(unit.reshard, bool):
            return
        if unit.reshard >= self.mesh.shard or self.mesh.shard % unit.reshard:
            raise PlanError(
                f"unit {unit.name}: reshard = {unit.reshard} must divide mesh.shard = {self.mesh.shard} and be smaller than it; "
                "write True to free everything or False to keep it"
            )

    def unit_of(self, parameter: str) -> Unit | None:
        """The unit with the deepest module around the parameter of that name."""
        best: tuple[int, Unit | None] = (-1, None)
        for unit in self.units:
            for module in unit.modules:
                if (module == "" or parameter.startswith(f"{module}.")) and len(module) > best[0]:
                    best = (len(module), unit)
        return best[1]

    @property
    def away_gradients(self) -> DType:
        """In which dtype the gradients of units away from the device wait for their update: as they were reduced, or as
        coarse as the master; but where several reductions are added up, in the master's, as on the device. Of one
        micro-batch on one device nothing is added up, and a gradient is as exact in the dtype that it was made in."""
        if self.precision.master != "fp32" or (self.batch.accumulate > 1 and self.batch.sync == "every"):
            return self.precision.master
        alone = self.mesh.devices == 1 and self.batch.accumulate == 1 and self.precision.reduce == "fp32"
        return self.precision.compute if alone else self.precision.reduce

    def packs(self, home: Home, slots: int) -> bool:
        """Whether a master rests as what its parameter does not tell of it: on the device or beside it on the host, as the
        other half. `slots`: the optimizer's tensors for each parameter; the second moment takes a mark along."""
        kinds = (self.precision.compute, self.precision.master, home.optimizer)
        return kinds == ("bf16", "fp32", "host") and home.params != "disk" and slots == 2

    def pairs(self, home: Home, slots: int) -> bool:
        """Whether the parameters rest in the half of the master's memory that packing it frees."""
        return home.params == "host" and self.packs(home, slots)

    def told(self, home: Home, slots: int) -> int:
        """Bytes of state, an element, that need not travel to the device, as the parameter there tells them."""
        return TOLD if home.params == "device" and self.packs(home, slots) else 0

    # -- the other forms of a plan ---------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """The plan that `to_dict` wrote, now or at an earlier version; anything unknown, missing or of a later one is refused."""
        if not isinstance(data, dict):
            raise PlanError(f"a plan is a JSON object, not {type(data).__name__}")
        data = dict(data)
        version = data.pop("version", None)
        if type(version) is not int or not 1 <= version <= VERSION:
            raise PlanError(f"plan version {version!r} is not known here; this fullshard reads versions 1 to {VERSION}")
        for name, since, value in (("staging", 2, STAGING), ("cpu_share", 3, None), ("backlog", 4, None)):
            if version < since:
                if name in data:
                    raise PlanError(f"plan version {version} has no {name}; write version {VERSION}, or leave {name} out")
                data[name] = value
        fields = _known(cls, "plan", data)
        for name, kind in (("mesh", Mesh), ("precision", Precision), ("batch", Batch), ("prefetch", Prefetch)):
            fields[name] = kind(**_known(kind, f"plan.{name}", fields[name]))
        if not isinstance(fields["units"], list | tuple):
            raise PlanError("plan.units must be a list")
        fields["units"] = tuple(_unit_from_dict(i, u) for i, u in enumerate(fields["units"]))
        return cls(**fields)

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
        """A name for this plan that is the same in every process and on every machine."""
        data = self.to_dict()
        # Named as before there were such choices: checkpoints remember the name.
        for version, name, value in ((3, "backlog", None), (2, "cpu_share", None), (1, "staging", STAGING)):
            if data[name] != value:
                break
            del data[name]
            data["version"] = version
        canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
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
        if choices.get("layout", "sharded") != "sharded":
            choices.setdefault("reshard", False)
        return dataclasses.replace(
            self, units=tuple(dataclasses.replace(u, **choices) if u.name in hit else u for u in self.units)
        )

    # -- for people ----------------------------------------------------------------------------------

    def diff(self, other: "Plan") -> list[str]:
        """What differs from here to `other`, a sentence a difference; empty when nothing does."""
        lines = list(_part_diffs(self, other))
        mine, theirs = {u.name: u for u in self.units}, {u.name: u for u in other.units}
        if gone := [n for n in mine if n not in theirs]:
            lines.append(f"only in the first plan: {', '.join(spans(gone))}")
        if new := [n for n in theirs if n not in mine]:
            lines.append(f"only in the second plan: {', '.join(spans(new))}")
        if not gone and not new and list(mine) != list(theirs):
            lines.append("the units are in another order")
        changes: dict[str, list[str]] = {}
        for name in mine:
            if name in theirs:
                for change in _unit_diffs(mine[name], theirs[name]):
                    changes.setdefault(change, []).append(name)
        lines += [f"{', '.join(spans(names))}: {change}" for change, names in changes.items()]
        return lines

    def __str__(self) -> str:
        head = [
            f"mesh       {self.mesh} = {self.mesh.devices} devices (replicate × shard × tensor)",
            f"precision  {self.precision}",
            f"batch      {self.batch}",
            f"prefetch   {self.prefetch}",
            f"compile    {'each block' if self.compile else 'no'}",
            *([f"staging    {self.staging} pieces of optimizer state on the device at a time"] if self.stages else []),
            *([] if self.cpu_share is None else [f"cpu_share  {self.cpu_share:g} of the pieces are updated by the host's cores"]),
            *(
                []
                if self.backlog is None
                else [f"backlog    {self.backlog} pieces whose gradients wait for their update at most"]
            ),
            f"digest     {self.digest[:12]}",
        ]
        alike: dict[tuple[str, ...], list[str]] = {}
        for unit in self.units:
            alike.setdefault(_choices(unit), []).append(unit.name)
        rows = [[span, *choices] for choices, names in alike.items() for span in spans(names)]
        return "\n".join(head) + "\n\n" + table(["units", "layout", "gathered until", "remat", "home"], rows)


def _unit_from_dict(index: int, data: object) -> Unit:
    name = data.get("name", index) if isinstance(data, dict) else index
    fields = _known(Unit, f"unit {name}", data)
    if isinstance(fields.get("modules"), list):
        fields["modules"] = tuple(fields["modules"])
    fields["home"] = Home(**_known(Home, f"unit {name}: home", fields["home"]))
    return Unit(**fields)


def _known(kind: type, where: str, data: object) -> dict[str, Any]:
    """`data` as keyword arguments of `kind`: every field there, and no other."""
    if not isinstance(data, dict):
        raise PlanError(f"{where} must be an object, not {data!r}")
    names = [f.name for f in dataclasses.fields(kind)]
    for key in data:
        if key not in names:
            raise PlanError(f"{where} has an unknown key {key!r}{nearest(str(key), names)}")
    for name in names:
        if name not in data:
            raise PlanError(f"{where} lacks the key {name!r}")
    return dict(data)


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} must be a positive integer, not {value!r}")
    if value > LARGEST_INTEGER:
        raise PlanError(f"{name} must be a positive integer of at most 64 bits, not one of {value.bit_length()}")


def _share(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise PlanError(f"{name} must be a number from 0 to 1, not {value!r}")
    return float(value)


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PlanError(f"{name} must be one of {', '.join(known)}, not {value!r}{nearest(str(value), list(known))}")


def _refuse_twice(what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlanError(f"{what} {name!r} appears twice in the plan; give each {what} one place")
        seen.add(name)


def _part_diffs(a: Plan, b: Plan) -> Iterator[str]:
    for part in ("mesh", "precision", "batch", "prefetch"):
        for f in dataclasses.fields(getattr(a, part)):
            x, y = getattr(getattr(a, part), f.name), getattr(getattr(b, part), f.name)
            if x != y:
                yield f"{part}.{f.name}: {x} → {y}"
    if a.compile != b.compile:
        yield f"compile: {a.compile} → {b.compile}".lower()
    if a.staging != b.staging:
        yield f"staging: {a.staging} → {b.staging}"
    if a.cpu_share != b.cpu_share:
        yield f"cpu_share: {_measured(a.cpu_share)} → {_measured(b.cpu_share)}"
    if a.backlog != b.backlog:
        yield f"backlog: {a.backlog or 'any'} → {b.backlog or 'any'}"


def _measured(share: float | None) -> str:
    return "measured" if share is None else f"{share:g}"


def _unit_diffs(a: Unit, b: Unit) -> Iterator[str]:
    if a.modules != b.modules:
        yield f"modules: {_paths(a)} → {_paths(b)}"
    for name in ("layout", "reshard", "remat"):
        if getattr(a, name) != getattr(b, name) or type(getattr(a, name)) is not type(getattr(b, name)):
            yield f"{name}: {getattr(a, name)} → {getattr(b, name)}"
    for f in dataclasses.fields(Home):
        if getattr(a.home, f.name) != getattr(b.home, f.name):
            yield f"home.{f.name}: {getattr(a.home, f.name)} → {getattr(b.home, f.name)}"


def _paths(unit: Unit) -> str:
    return ", ".join(m or "(root)" for m in unit.modules)


def _choices(unit: Unit) -> tuple[str, ...]:
    if unit.layout == "replicated":
        until = "always whole"
    elif unit.layout == "optimizer":
        until = "end of step"
    elif isinstance(unit.reshard, bool):
        until = "end of forward" if unit.reshard else "end of backward"
    else:
        until = f"end of forward, then {unit.reshard} ranks"
    return unit.layout, until, unit.remat, str(unit.home)
