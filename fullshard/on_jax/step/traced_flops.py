"""The floating-point operations of a traced program on all devices together. The body of a loop counts once, as XLA counts it."""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core


def traced_flops(jaxpr: core.Jaxpr) -> float:
    """Two for each multiplication and addition of a product, one for each element of any other result."""
    return sum(_flops(eqn) for eqn in jaxpr.eqns)


def _flops(eqn: core.JaxprEqn) -> float:
    inner = list(_programs(eqn.params))
    if inner:
        return sum(traced_flops(jaxpr) for jaxpr in inner)
    results = sum(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars)
    given = [math.prod(getattr(v.aval, "shape", ())) for v in eqn.invars]
    if eqn.primitive.name == "dot_general":
        (dims, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * results * math.prod(eqn.invars[0].aval.shape[d] for d in dims)  # type: ignore[attr-defined]
    if eqn.primitive.name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]  # type: ignore[attr-defined]
        return 2.0 * results * math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    return float(max([results, *given]) if eqn.primitive.name.startswith("reduce_") else results)


def _programs(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr: Any = getattr(part, "jaxpr", part)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
