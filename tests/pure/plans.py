"""Arbitrary valid plans, and plans that hardly differ, for properties."""

import dataclasses

from hypothesis import reject
from hypothesis import strategies as st

from fullshard import Batch, Home, Kernels, Mesh, Plan, PlanError, Precision, Prefetch, Unit, Wire

counts = st.integers(1, 2**40)
dtypes = st.sampled_from(["fp32", "bf16", "fp16"])
places = st.sampled_from(["device", "host", "disk"])
meshes = st.builds(Mesh, replicate=st.integers(1, 4), shard=st.sampled_from([1, 2, 3, 4, 6, 8, 12]), tensor=st.integers(1, 4))
homes = st.builds(Home, params=places, optimizer=places, activations=places)
precisions = st.builds(
    Precision, compute=dtypes, reduce=dtypes, master=st.sampled_from(["fp32", "bf16"]), output=st.none() | dtypes
).filter(lambda p: p.output in (None, p.compute) or p.compute != p.master)
float8 = st.builds(Precision, compute=st.just("bf16"), reduce=dtypes, float8=st.sampled_from(["tensorwise", "rowwise"]))
batches = st.builds(Batch, counts, counts, counts) | st.builds(Batch, counts, counts, st.integers(2, 9), st.just("last"))
prefetches = st.builds(Prefetch, counts, counts)
formats = st.sampled_from(["int8", "fp8"])
kernels = st.builds(Kernels, st.sampled_from(["auto", "cudnn", "flash"]), st.sampled_from(["auto", "fused", "torch"]))
wires = st.just(Wire()) | st.builds(Wire, formats, formats, st.integers(16, 512), st.booleans())
PARTS = ["nothing", "unit", "mesh", "units", "precision", "batch", "prefetch", "compile", "staging", "backlog", "wire", "kernels"]


@st.composite
def choices(draw, shard: int) -> dict:
    """What a unit may choose on a mesh with that many shards."""
    layout = draw(st.sampled_from(["sharded", "optimizer", "replicated"]))
    groups = [n for n in range(2, shard) if shard % n == 0]
    reshards = st.booleans() | st.sampled_from(groups) if groups else st.booleans()
    reshard = draw(reshards) if layout == "sharded" else False
    return {
        "layout": layout,
        "reshard": reshard,
        "remat": draw(st.sampled_from(["none", "selective", "full"])),
        "home": draw(homes),
    }


@st.composite
def plans(draw) -> Plan:
    mesh = draw(meshes)
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5, unique=True))
    modules = draw(st.lists(st.text(max_size=8), min_size=2 * len(names), max_size=2 * len(names), unique=True))
    units = tuple(
        Unit(name, tuple(modules[2 * i : 2 * i + draw(st.integers(1, 2))]), **draw(choices(mesh.shard)))
        for i, name in enumerate(names)
    )
    layouts = {u.layout for u in units}
    prefetch = Prefetch() if layouts == {"replicated"} else draw(prefetches)
    if not any(u.reshard for u in units):
        prefetch = dataclasses.replace(prefetch, backward=1)
    batch = draw(batches.filter(lambda b: b.sync == "every") if layouts == {"optimizer"} else batches)
    away = any(u.home.optimizer != "device" for u in units)
    staging = draw(st.integers(1, 9)) if away else 4
    backlog = draw(st.none() | st.integers(1, 9)) if away else None
    precision = draw(precisions if mesh.tensor > 1 else precisions | float8)
    plain = mesh.shard == 1 or layouts == {"replicated"} or "fp16" in (precision.compute, precision.reduce)
    wire = Wire() if plain or precision.float8 else draw(wires)
    return Plan(
        mesh, units, precision, batch, prefetch, draw(st.booleans()), staging, backlog=backlog, wire=wire, kernels=draw(kernels)
    )


@st.composite
def neighbours(draw) -> tuple[Plan, Plan]:
    """Two plans of the same unit order that differ in one part at most."""
    first = draw(plans())
    part = draw(st.sampled_from(PARTS))
    if part == "nothing":
        return first, Plan.from_json(first.to_json())
    if part == "unit":
        changed = dataclasses.replace(first.units[0], **draw(choices(first.mesh.shard)))
        other = {"units": (changed, *first.units[1:])}
    else:
        other = {part: getattr(draw(plans()), part)}
    try:
        return first, dataclasses.replace(first, **other)
    except PlanError:  # the part does not fit the rest
        reject()
