"""A plan as JSON data and back. Every key must be there but those that are `absent`, and no other."""

import dataclasses
from typing import TYPE_CHECKING, Any

from fullshard.base.errors import nearest
from fullshard.plan.choice import Part, PlanError
from fullshard.plan.choices import Batch, Kernels, Mesh, Precision, Prefetch, Wire
from fullshard.plan.unit_choices import Home, Unit

if TYPE_CHECKING:
    from fullshard.plan.plan import Plan

VERSION = 5
PARTS: dict[str, type[Part]] = {
    "mesh": Mesh,
    "precision": Precision,
    "batch": Batch,
    "prefetch": Prefetch,
    "wire": Wire,
    "kernels": Kernels,
}


def plan_data(plan: "Plan") -> dict[str, Any]:
    """The plan as JSON data, with its version."""
    return {"version": VERSION, **_data(plan)}


def _data(part: Any) -> dict[str, Any]:
    """Keys younger than the version are written only where they differ from their default: plans without them keep their
    hashes."""
    fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if not (_absent(f) and _is_default(part, f))}
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _data(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _absent(field: "dataclasses.Field[Any]") -> bool:
    return field.metadata.get("absent", False)


def _is_default(part: Any, field: "dataclasses.Field[Any]") -> bool:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return getattr(part, field.name) == default


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
    fields = dataclasses.fields(kind)
    names = [f.name for f in fields]
    for key in data:
        if key not in names:
            raise PlanError(f"{where} has an unknown key {key!r}{nearest(str(key), names)}")
    for f in fields:
        if f.name not in data and not _absent(f):
            raise PlanError(f"{where} lacks the key {f.name!r}")
    return dict(data)
