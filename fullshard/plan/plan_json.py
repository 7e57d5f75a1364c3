"""A plan as JSON data and back. Every key must be there but those of OPTIONAL, and no other."""

import dataclasses
from typing import TYPE_CHECKING, Any

from fullshard.base.errors import nearest
from fullshard.plan.choices import Batch, Home, Kernels, Mesh, PlanError, Precision, Prefetch, Unit, Wire

if TYPE_CHECKING:
    from fullshard.plan.plan import Plan

VERSION = 5
PARTS: dict[str, type] = {
    "mesh": Mesh,
    "precision": Precision,
    "batch": Batch,
    "prefetch": Prefetch,
    "wire": Wire,
    "kernels": Kernels,
}
# Keys that came after version 5 began. They are written only if they differ from their default, so that plans without them
# keep their hashes.
OPTIONAL: dict[str, Any] = {
    "plan.wire": Wire(),
    "plan.wire.memory": "torch",
    "plan.kernels": Kernels(),
    "plan.precision.buffers": None,
    "plan.precision.float8": None,
    "plan.precision.moments": None,
    "plan.precision.rounding": "nearest",
}


def plan_data(plan: "Plan") -> dict[str, Any]:
    """The plan as JSON data, with its version."""
    data = {"version": VERSION, **dataclasses.asdict(plan)}
    for path, default in OPTIONAL.items():
        *tables, key = path.split(".")[1:]
        holder = data
        for name in tables:
            holder = holder.get(name, {})  # a whole part may have been left out
        if key in holder and holder[key] == (dataclasses.asdict(default) if dataclasses.is_dataclass(default) else default):  # type: ignore[arg-type]
            del holder[key]
    return data


def plan_arguments(plan_type: type, data: object) -> dict[str, Any]:
    """The fields of a plan, as arguments of `plan_type`, from what `Plan.to_dict` wrote. Raise one sentence for anything
    unknown, missing or of another version."""
    if not isinstance(data, dict):
        raise PlanError(f"a plan is a JSON object, not {type(data).__name__}")
    data = {key: value for key, value in data.items() if key != "choices"}  # of a run: who made them, which is no part of it
    version = data.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise PlanError(f"plan version {version!r} is not known here; this fullshard reads version {VERSION}")
    fields = _arguments(plan_type, "plan", data)
    for name, kind in PARTS.items():
        if name in fields:
            fields[name] = kind(**_arguments(kind, f"plan.{name}", fields[name]))
    if not isinstance(fields["units"], list | tuple):
        raise PlanError("plan.units must be a list")
    fields["units"] = tuple(_unit(i, u) for i, u in enumerate(fields["units"]))
    return fields


def _unit(index: int, data: object) -> Unit:
    name = data.get("name", index) if isinstance(data, dict) else index
    fields = _arguments(Unit, f"unit {name}", data)
    if isinstance(fields.get("modules"), list):
        fields["modules"] = tuple(fields["modules"])
    fields["home"] = Home(**_arguments(Home, f"unit {name}: home", fields["home"]))
    return Unit(**fields)


def _arguments(kind: type, where: str, data: object) -> dict[str, Any]:
    """`data` as keyword arguments of `kind`: every field there but optional ones, and no other."""
    if not isinstance(data, dict):
        raise PlanError(f"{where} must be an object, not {data!r}")
    names = [f.name for f in dataclasses.fields(kind)]
    for key in data:
        if key not in names:
            raise PlanError(f"{where} has an unknown key {key!r}{nearest(str(key), names)}")
    for name in names:
        if name not in data and f"{where}.{name}" not in OPTIONAL:
            raise PlanError(f"{where} lacks the key {name!r}")
    return dict(data)
