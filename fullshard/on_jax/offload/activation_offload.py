"""Keep what a call saves for backward on the host.

JAX's own offload policies leave it to XLA when to copy. For blocks that are not in a loop, XLA copies only when backward needs
the values, so nothing is saved. Here the copy to the host ends before the next call starts, and the copy back starts when the
call's backward does.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fullshard.on_jax.offload.memory_kinds import is_on_host

SMALL = 4  # tensors so many times smaller than the largest stay on the device
Shapes = frozenset[tuple[int, ...]]


def offloading(run: Callable[..., Any], shapes: Shapes) -> Callable[..., Any]:
    """`run`, with its large residuals on the host between forward and backward. What has one of `shapes`, those of parameters,
    stays on the device."""

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        moving = [_is_differentiable(x) for x in leaves]

        def of(trained: list[Any], fixed: list[Any]) -> Any:
            both = [iter(fixed), iter(trained)]
            return run(*jax.tree.unflatten(tree, [next(both[m]) for m in moving]))

        def forward(trained: list[Any], fixed: list[Any]) -> tuple[Any, Any]:
            out, pullback = jax.vjp(lambda trained: of(trained, fixed), trained)
            residuals, kept = jax.tree.flatten(pullback)
            goes = _large(residuals, shapes)
            sent = [jax.device_put(x, jax.memory.Space.Host) if away else x for x, away in zip(residuals, goes, strict=True)]
            host = [x for x, away in zip(sent, goes, strict=True) if away]
            out, host = jax.lax.optimization_barrier((out, host))
            back = iter(host)
            return out, jax.tree.unflatten(kept, [next(back) if away else x for x, away in zip(sent, goes, strict=True)])

        def backward(pullback: Any, grad: Any) -> tuple[Any, None]:
            residuals, kept = jax.tree.flatten(pullback)
            here = [x for x in residuals if is_on_host(x)]
            floats = [g for g in jax.tree.leaves(grad) if g.dtype != jax.dtypes.float0]
            _, here = jax.lax.optimization_barrier((floats, here))
            back = iter(here)
            moved = [jax.device_put(next(back), jax.memory.Space.Device) if is_on_host(x) else x for x in residuals]
            return jax.tree.unflatten(kept, moved)(grad)[0], None

        wrapped = jax.custom_vjp(of)
        wrapped.defvjp(forward, backward)
        trained = [x for x, m in zip(leaves, moving, strict=True) if m]
        return wrapped(trained, [x for x, m in zip(leaves, moving, strict=True) if not m])

    return call


def _is_differentiable(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact) and not is_on_host(x)


def _large(residuals: list[Any], shapes: Shapes) -> list[bool]:
    able = [jnp.issubdtype(x.dtype, jnp.floating) and x.shape not in shapes and not is_on_host(x) for x in residuals]
    largest = max((x.size for x, a in zip(residuals, able, strict=True) if a), default=0)
    return [a and SMALL * x.size > largest for x, a in zip(residuals, able, strict=True)]
