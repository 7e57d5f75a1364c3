"""The first step against the plan, before it is compiled: what the plan says and the step would not do is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.step.step_products import Product, StepProducts
from fullshard.on_jax.step.traced_values import TracedValues
from fullshard.on_jax.tensors.dtypes import JAX_DTYPES

KEPT = 0.05  # of what a unit with remat computes: what it may keep besides. Without remat it keeps about a third


def check_traced(state: JaxState, traced: Any, values: TracedValues) -> tuple[str, ...]:
    """Raise where a traced step does not do what the plan says. Returns notes on what it does otherwise, as it was told to.
    `values`: of this step."""
    names = sorted(state.params)  # a tree of arguments has its keys in this order
    products = StepProducts.of(traced.jaxpr.jaxpr, names)
    _refuse_not_recomputed(state, products)
    _refuse_kept(state, values)
    compute = np.dtype(JAX_DTYPES[state.plan.precision.compute])
    found = list(products.found.values())
    other = [p for p in found if set(p.dtypes) != {compute.name}]
    for wrong in other:
        if not (wrong.exact and all(np.dtype(d).itemsize >= compute.itemsize for d in wrong.dtypes)):
            raise FullshardError(_sentence(state, wrong, len(other), len(found)))
    return tuple(_notes(state, found, other))


def _sentence(state: JaxState, wrong: Product, count: int, of: int) -> str:
    compute = state.plan.precision.compute
    what = f"that of {wrong.weight}" if wrong.weight else f"one in unit {wrong.unit}"
    where = f" ({wrong.line})" if wrong.line else ""
    dtypes = " × ".join(wrong.dtypes)
    begin = f"precision.compute = {compute!r}, but {count} of {of} products are not so, first {what}{where}, of {dtypes}"
    if wrong.outside:
        return (
            f"{begin}; the weight is read outside the calls of its module, where it is not cast: call a method of the module "
            "instead, as nnx.Embed.attend, or write .astype(x.dtype) behind it"
        )
    return (
        f"{begin}; cast what is multiplied by .astype(weight.dtype), give a product that is meant to be so precision='highest', "
        "or write precision.compute = 'fp32'"
    )


def _refuse_not_recomputed(state: JaxState, products: StepProducts) -> None:
    """Raise for a unit with remat of which nothing is computed in a call that backward could repeat."""
    outside = {p.weight: p for p in products.found.values() if p.outside}
    for name, p in outside.items():
        unit = state.shardings.parameters[name].unit
        if unit.remat != "none" and unit.name not in products.repeated:
            raise FullshardError(
                f"unit {unit.name}: remat = {unit.remat!r}, but {name} is read outside the calls of its module ({p.line}), which "
                "backward does not repeat; call a method of the module, or write remat = 'none'"
            )


def _refuse_kept(state: JaxState, values: TracedValues) -> None:
    """Raise for a unit that keeps for backward what its remat says is computed again."""
    for unit in state.executed.units:
        found = values.units.get(unit.name)
        if found is None or unit.remat == "none":
            continue
        kept = found.inner + (found.products if unit.remat == "full" else 0)
        if kept > KEPT * found.results:
            what = "inputs" if unit.remat == "full" else "inputs and its matrix products"
            raise FullshardError(
                f"unit {unit.name}: remat = {unit.remat!r} keeps its {what} for backward, but the step keeps "
                f"{bytes_text(kept // state.plan.mesh.data)} besides on each device; this is a bug of fullshard"
            )


def _notes(state: JaxState, found: list[Product], other: list[Product]) -> Iterator[str]:
    if other:
        kinds = sorted({d for p in other for d in p.dtypes})
        yield f"{len(other)} of {len(found)} products are computed in {' and '.join(kinds)}, as their precision='highest' says"
    sharded = (p for p in found if p.outside and state.shardings.parameters[p.weight].unit.layout != "replicated")
    names = dict.fromkeys(p.weight for p in sharded) if state.plan.mesh.shard > 1 else {}
    for name in names:
        yield f"{name} is read outside the calls of its module: XLA decides when it is gathered and freed"
