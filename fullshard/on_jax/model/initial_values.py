"""The initial values of a model, one array at a time, each computed on the devices that hold it.

The model's code is traced once. From the trace each array gets a program of its own: the operations that lead to it, from random
keys and counters on, which are computed first. Equal programs, such as those of equal blocks, are compiled once. So a process
never holds more than its shards and what one array takes to compute.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

SMALL = 1024  # elements: whole numbers and keys of at most this size are computed before all else, for all arrays at once


class HostCountedStream(nnx.RngStream):
    """A stream of NNX whose keys are counted outside the trace. They are the same keys. Adding to a traced count takes time that
    grows with the operations before it: 19 seconds for 126 layers."""

    def __init__(self, key: jax.Array, *, tag: str):
        super().__init__(key, tag=tag)
        self.count = nnx.RngCount(np.uint32(0), tag=tag)  # type: ignore[arg-type]

    def __call__(self) -> jax.Array:
        at = self.count.get_value()
        self.count.set_value(at + np.uint32(1))  # a new number: what is changed in place changes in the trace, too
        return jax.random.fold_in(self.key[...], at)

    def fork(self, **options: Any) -> nnx.RngStream:
        return self._at_count().fork(**options)

    def split(self, k: int | tuple[int, ...]) -> nnx.RngStream:
        return self._at_count().split(k)

    def broadcast(self, k: int | tuple[int, ...]) -> nnx.RngStream:
        return self._at_count().broadcast(k)

    def _at_count(self) -> nnx.RngStream:
        """NNX's own stream for the next key: what the model keeps of this one is of NNX's class."""
        found = nnx.RngStream(self.key[...], tag=self.tag)
        found.count = nnx.RngCount(jnp.asarray(self.count.get_value()), tag=self.tag)
        self()
        return found


def init_rngs(key: jax.Array) -> nnx.Rngs:
    """`nnx.Rngs(key)` for a trace."""
    found = nnx.Rngs(key)
    vars(found)["default"] = HostCountedStream(key, tag="default")
    return found


@dataclass
class ArrayPrograms:
    """The outputs of a traced function, each to be computed by itself. `given`: values of variables that need no program."""

    jaxpr: core.Jaxpr
    given: dict[core.Var, Any]
    makers: dict[core.Var, core.JaxprEqn] = field(default_factory=dict)
    compiled: dict[Any, Callable[..., jax.Array]] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any], *args: Any) -> tuple["ArrayPrograms", Any]:
        """Trace a function. Returns its programs, and its result with the numbers of outputs in place of arrays."""
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        flat, tree = jax.tree.flatten(shape)
        names = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        found = cls(closed.jaxpr, dict(zip(names, [*closed.consts, *jax.tree.leaves(args)], strict=True)))
        for eqn in closed.jaxpr.eqns:
            found.makers |= dict.fromkeys(eqn.outvars, eqn)
            found._compute_small(eqn)
        return found, jax.tree.unflatten(tree, range(len(flat)))

    def array(self, output: int, sharding: jax.sharding.Sharding) -> jax.Array:
        """An output, computed where it lies. Waits until it is there: programs under way at once would add up in memory."""
        var = self.jaxpr.outvars[output]
        eqns = [] if isinstance(var, core.Literal) else self._leading_to(var)
        inputs = [v for v in _read(eqns, [var]) if v in self.given]
        key = (_signature(eqns, inputs, var), sharding)
        if key not in self.compiled:
            part = self.jaxpr.replace(constvars=[], invars=inputs, outvars=[var], eqns=eqns)
            run = core.jaxpr_as_fun(core.ClosedJaxpr(part, []))
            self.compiled[key] = jax.jit(lambda *args: run(*args)[0], out_shardings=sharding)
        return jax.block_until_ready(self.compiled[key](*[self.given[v] for v in inputs]))

    def _compute_small(self, eqn: core.JaxprEqn) -> None:
        """Compute keys and counters now. Only whole numbers: rounding of others depends on the program that they are part of."""
        if not all(_is_small(v.aval) for v in eqn.outvars) or any(v not in self.given for v in _read([eqn])):
            return
        part = self.jaxpr.replace(constvars=[], invars=list(_read([eqn])), outvars=eqn.outvars, eqns=[eqn])
        values = core.jaxpr_as_fun(core.ClosedJaxpr(part, []))(*[self.given[v] for v in part.invars])
        self.given |= dict(zip(eqn.outvars, values, strict=True))

    def _leading_to(self, output: core.Var) -> list[core.JaxprEqn]:
        """The operations that an output needs, in order."""
        needed: set[int] = set()
        wanted = [output]
        while wanted:
            var = wanted.pop()
            if var not in self.given and id(eqn := self.makers[var]) not in needed:
                needed.add(id(eqn))
                wanted += _read([eqn])
        return [eqn for eqn in self.jaxpr.eqns if id(eqn) in needed]


def _is_small(aval: Any) -> bool:
    exact = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) or jnp.issubdtype(aval.dtype, jnp.integer)
    return bool(exact) and math.prod(aval.shape) <= SMALL


def _read(eqns: Sequence[core.JaxprEqn], more: Sequence[Any] = ()) -> dict[core.Var, None]:
    """The variables that operations read, each once, in order."""
    read = [v for eqn in eqns for v in eqn.invars] + list(more)
    return {v: None for v in read if not isinstance(v, core.Literal)}


def _signature(eqns: Sequence[core.JaxprEqn], inputs: Sequence[core.Var], output: Any) -> Any:
    """Equal for operations that do the same with other inputs. Parameters that cannot be compared are equal only if they are the
    same object: JAX traces a function of its own once for each shape."""
    numbers: dict[core.Var, int] = {v: i for i, v in enumerate(inputs)}

    def of(v: Any) -> Any:
        return (str(v.val), str(v.aval)) if isinstance(v, core.Literal) else numbers.setdefault(v, len(numbers))

    def operations() -> Iterator[Any]:
        for eqn in eqns:
            params = tuple((name, _comparable(value)) for name, value in sorted(eqn.params.items()))
            yield eqn.primitive, params, tuple(map(of, eqn.invars)), tuple(map(of, eqn.outvars))

    return tuple(str(v.aval) for v in inputs), tuple(operations()), of(output)


def _comparable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
