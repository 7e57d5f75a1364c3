"""What the forward pass of a traced step computes and keeps for backward, unit by unit, in bytes of all devices together.

Weights are left out, whole or in shards, in whatever dtype: they are the plan's to gather and free.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core

from fullshard.on_jax.communication.hlo_collectives import unit_in
from fullshard.on_jax.private.jax_internals import scanned_arguments, scope_and_line
from fullshard.on_jax.step.step_products import GATHER, PRODUCTS, VIEWS

CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_vjp_call", "custom_jvp_call")
PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
TIE = "optimization_barrier"
ROUNDING = "reduce_precision"  # `jax.checkpoint` puts it behind what a policy keeps


@dataclass
class UnitValues:
    """Bytes of a unit's results. `results`: all; `largest`: the largest one. Of those that backward reads, `passed` are the
    inputs and outputs of the unit's blocks, `products` other results of matrix products, and `inner` all the rest."""

    results: int = 0
    largest: int = 0
    passed: int = 0
    products: int = 0
    inner: int = 0

    @property
    def kept(self) -> int:
        return self.passed + self.products + self.inner


@dataclass
class TracedValues:
    """The values of a program whose first arguments are `weights` weights. What is of no unit, as the loss, has an empty name."""

    units: dict[str, UnitValues] = field(default_factory=dict)

    @classmethod
    def of(cls, jaxpr: core.Jaxpr, weights: int) -> "TracedValues":
        found = cls()
        found.walk(jaxpr, set(jaxpr.invars[:weights]), "")
        return found

    def walk(self, jaxpr: core.Jaxpr, weights: set[Any], scope: str) -> None:
        """Record the values of a step, or of the loop over its micro-batches."""
        made: dict[Any, tuple[str, core.JaxprEqn]] = {}
        same: dict[Any, Any] = {}  # what a value that is tied to others is
        read: set[Any] = set()  # by backward
        passed: set[Any] = set()  # from one unit to another
        for eqn in jaxpr.eqns:
            at = f"{scope}/{scope_and_line(eqn)[0]}"
            unit, is_backward = unit_in(at), "transpose(" in at
            given = [same.get(v, v) for v in eqn.invars if not isinstance(v, core.Literal)]
            if eqn.primitive.name == TIE:
                same.update(zip(eqn.outvars, given, strict=True))
            elif eqn.primitive.name in (*VIEWS, *CALLS, GATHER) and given and all(v in weights for v in given):
                weights.update(eqn.outvars)
            elif is_backward:
                read.update(given)
            elif unit or "jvp(" in at:
                passed.update(v for v in given if v in made and made[v][0] != unit)
                made.update((v, (unit, eqn)) for v in eqn.outvars)
                self._count(unit, eqn)
            elif eqn.primitive.name == "scan":
                body = eqn.params["jaxpr"].jaxpr
                both = [(v, inner) for v, inner in zip(eqn.invars, body.invars, strict=True) if not isinstance(v, core.Literal)]
                self.walk(body, {inner for v, inner in both if same.get(v, v) in weights}, at)
        makers = {v: eqn for v, (_, eqn) in made.items()}
        for value in read & made.keys():
            unit, eqn = made[value]
            root = _root(value, makers)
            is_passed = root in passed or root not in made or made[root][0] != unit
            self._keep(value, unit, eqn, makers.get(root), is_passed=is_passed)

    def _count(self, unit: str, eqn: core.JaxprEqn) -> None:
        values = self.units.setdefault(unit, UnitValues())
        for nbytes, times in _results(eqn, 1):
            values.results += nbytes * times
            values.largest = max(values.largest, nbytes)

    def _keep(self, value: Any, unit: str, eqn: core.JaxprEqn, origin: core.JaxprEqn | None, *, is_passed: bool) -> None:
        values = self.units[unit]
        if eqn.primitive.name == "scan":
            origin, is_passed = _in_loop(eqn, eqn.outvars.index(value))
        kind = "passed" if is_passed else "products" if origin and origin.primitive.name in PRODUCTS else "inner"
        setattr(values, kind, getattr(values, kind) + _nbytes(value))


def _in_loop(eqn: core.JaxprEqn, index: int) -> tuple[core.JaxprEqn | None, bool]:
    """What makes a result of a loop over blocks, and whether the result is what the blocks are given or return."""
    body = eqn.params["jaxpr"].jaxpr
    makers = {v: e for e in body.eqns for v in e.outvars}
    origin = makers.get(_root(body.outvars[index], makers))
    return origin, origin is None or index < scanned_arguments(eqn.params)[1]


def _root(value: Any, makers: dict[Any, core.JaxprEqn]) -> Any:
    """What a value is a view of."""
    while not isinstance(value, core.Literal) and value in makers and makers[value].primitive.name in (*VIEWS, ROUNDING):
        value = makers[value].invars[0]
    return None if isinstance(value, core.Literal) else value


def _results(eqn: core.JaxprEqn, times: int) -> Iterator[tuple[int, int]]:
    """(bytes, how often) of the results of an operation that runs so often, and of those inside it."""
    program = next((eqn.params[name] for name in PROGRAMS if name in eqn.params), None)
    inner: Any = getattr(program, "jaxpr", program)
    if hasattr(inner, "eqns"):
        times *= eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for part in inner.eqns:
            yield from _results(part, times)
    elif eqn.primitive.name not in (*VIEWS, *CALLS, GATHER):
        yield from ((_nbytes(v), times) for v in eqn.outvars)


def _nbytes(value: Any) -> int:
    aval = value.aval
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") and hasattr(aval.dtype, "itemsize") else 0
