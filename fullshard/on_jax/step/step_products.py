"""The matrix products and convolutions of a traced step, and the dtypes in which it computes them.

Counted are those of the forward pass that a weight or what was computed from one goes into: in a unit's calls, or with a weight
that is read outside of them. Products of the loss and of positions are not the plan's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core

from fullshard.on_jax.communication.hlo_collectives import unit_in
from fullshard.on_jax.model.layer_dtypes import is_exact
from fullshard.on_jax.private.jax_internals import scanned_arguments, scope_and_line

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
# Operations that show a weight in another way.
VIEWS = (
    "transpose", "reshape", "convert_element_type", "broadcast_in_dim", "squeeze", "expand_dims", "device_put", "name", "copy",
    "slice", "dynamic_slice", "optimization_barrier",
)  # fmt: skip
GATHER = "sharding_constraint"


@dataclass(frozen=True)
class Origin:
    """Where a value is from. `weight`: the parameter that it is, or nothing if it was computed from some. `gathered`: whether a
    unit's call has gathered it."""

    weight: str = ""
    gathered: bool = False


@dataclass(frozen=True)
class Product:
    """A product of a step. `weight`: one that it multiplies, if it does; `outside`: that weight is read outside the calls of its
    unit. `line`: of the user's code. `exact`: it was marked to be computed in the dtype of its inputs."""

    unit: str
    weight: str
    outside: bool
    dtypes: tuple[str, str]
    line: str
    exact: bool


COMPUTED = Origin()
Origins = list[Origin | None]  # None: from no weight


@dataclass
class StepProducts:
    """The products of a program whose first arguments are the weights with these names. `repeated`: units whose forward is
    computed again in backward."""

    found: dict[Any, Product] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, jaxpr: core.Jaxpr, weights: Sequence[str]) -> "StepProducts":
        products = cls()
        others = [None] * (len(jaxpr.invars) - len(weights))
        products.walk(jaxpr, [*map(Origin, weights), *others], "")
        return products

    def walk(self, jaxpr: core.Jaxpr, origins: Origins, scope: str) -> Origins:
        """Record the products of a program in a scope; return where its results are from."""
        known = dict(zip(jaxpr.invars, origins, strict=True))
        for eqn in jaxpr.eqns:
            inputs = [None if isinstance(v, core.Literal) else known.get(v) for v in eqn.invars]
            inner, line = scope_and_line(eqn)
            at = f"{scope}/{inner}"
            if "rematted_computation" in at:
                self.repeated.add(unit_in(at))
            if eqn.primitive.name in PRODUCTS and "transpose(" not in at:
                self._record(eqn, inputs, at, line)
            known.update(zip(eqn.outvars, self._results(eqn, inputs, at), strict=True))
        return [None if isinstance(v, core.Literal) else known.get(v) for v in jaxpr.outvars]

    def _results(self, eqn: core.JaxprEqn, inputs: Origins, at: str) -> Origins:
        count = len(eqn.outvars)
        if eqn.primitive.name in VIEWS:
            return inputs if count == len(inputs) else inputs[:count]
        if eqn.primitive.name == GATHER:
            return [Origin(inputs[0].weight, True) if inputs[0] else None]
        parts = list(_parts(eqn, inputs))
        if not parts:
            return [COMPUTED if any(inputs) else None] * count
        found = [self.walk(jaxpr, given, at) for jaxpr, given in parts]
        carried = _carried(eqn)
        if carried:  # what a loop's body returns is what it is given next
            (jaxpr, given), (first, size) = parts[-1], carried
            both = [a or b for a, b in zip(given[first : first + size], found[-1][:size], strict=True)]
            found.append(self.walk(jaxpr, [*given[:first], *both, *given[first + size :]], at))
        return [next(filter(None, values), None) for values in zip(*found[-2:] if carried else found, strict=True)]

    def _record(self, eqn: core.JaxprEqn, inputs: Origins, at: str, line: str) -> None:
        pair = inputs[:2]
        weights = [o for o in pair if o and o.weight]
        unit, outside = unit_in(at), any(not o.gathered for o in weights)
        avals: list[Any] = [v.aval for v in eqn.invars[:2]]
        dtypes = [aval.dtype for aval in avals]
        # Two weights are multiplied by a loss that is a norm of them.
        is_planned = any(pair) if unit else len(weights) == 1
        if is_planned and all(np.issubdtype(d, np.floating) or d.name.startswith("bfloat") for d in dtypes):
            weight = weights[0].weight if weights else ""
            exact = is_exact(eqn.params.get("precision"))
            self.found[at, id(eqn)] = Product(unit, weight, outside, (dtypes[0].name, dtypes[1].name), line, exact)


def _parts(eqn: core.JaxprEqn, inputs: Origins) -> Iterator[tuple[core.Jaxpr, Origins]]:
    """The programs inside an operation, each with where its arguments are from."""
    params = eqn.params
    if eqn.primitive.name == "cond":
        for branch in params["branches"]:
            yield branch.jaxpr, inputs[1:]
    elif eqn.primitive.name == "while":
        conditions, constants = params["cond_nconsts"], params["body_nconsts"]
        yield params["body_jaxpr"].jaxpr, inputs[conditions:]
        assert constants >= 0
    else:
        for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            inner = getattr(params.get(name), "jaxpr", params.get(name))
            if inner is not None and (len(inner.invars), len(inner.outvars)) == (len(inputs), len(eqn.outvars)):
                yield inner, inputs
                return


def _carried(eqn: core.JaxprEqn) -> tuple[int, int] | None:
    """The first of the arguments that a loop carries, and how many they are."""
    if eqn.primitive.name == "scan":
        return scanned_arguments(eqn.params)
    if eqn.primitive.name == "while":
        return eqn.params["body_nconsts"], len(eqn.outvars)
    return None
