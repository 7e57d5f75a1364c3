"""The dtype in which layers compute: the plan's.

NNX's layers have `dtype` for what they compute and `param_dtype` for what they hold. Without a `dtype` they take the widest of
their inputs' and weights', and an embedding that of its table; so one fp32 table makes a whole model compute in fp32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fullshard.base.errors import FullshardError
from fullshard.on_jax.model.module_tree import named_modules
from fullshard.on_jax.tensors.dtypes import JAX_DTYPES
from fullshard.plan.plan import Plan

NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.SpectralNorm, nnx.WeightNorm)
HOLDS_STATISTICS = (nnx.BatchNorm, nnx.SpectralNorm, nnx.WeightNorm)  # their dtype would round what they hold


def refuse_other_dtypes(model: nnx.Module, plan: Plan) -> None:
    """Raise where a layer was told to compute in another dtype than the plan says. `model` may be abstract."""
    compute = np.dtype(JAX_DTYPES[plan.precision.compute])
    for path, module in named_modules(model):
        own = _own_dtype(module)
        if own is not None and own != compute and not _may_differ(module, own, compute):
            wider = own.itemsize > compute.itemsize and hasattr(module, "precision")
            raise FullshardError(
                f"{path or type(module).__name__} was made with dtype={own.name}, but the plan computes in {compute.name}: leave "
                f"its dtype out, or write precision.compute = {_plan_name(own)!r}"
                + (", or give this layer precision='highest' if it alone is meant to be wider" if wider else "")
            )


def set_dtypes(model: nnx.Module, plan: Plan) -> None:
    """Let layers that were told no dtype compute in the plan's. `model` is abstract."""
    compute = JAX_DTYPES[plan.precision.compute]
    for _, module in named_modules(model):
        if not _has_dtypes(module) or _own_dtype(module) is not None or isinstance(module, HOLDS_STATISTICS):
            continue
        settings: Any = module
        settings.dtype = compute
        if hasattr(module, "initialize_carry"):
            settings.param_dtype = compute  # of the first carry, which must have the dtype of the next ones


def is_exact(precision: Any) -> bool:
    """Whether a product was marked as one to be computed as exactly as its inputs allow."""
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (jax.lax.Precision.HIGHEST, "highest", "float32") for p in both)


def _has_dtypes(module: nnx.Module) -> bool:
    return hasattr(module, "dtype") and hasattr(module, "param_dtype")


def _own_dtype(module: nnx.Module) -> np.dtype[Any] | None:
    """The floating dtype that a layer was told to compute in. An embedding that was told none has that of its table."""
    given: Any = getattr(module, "dtype", None)
    if given is None or not _has_dtypes(module):
        return None
    try:
        found, held = np.dtype(given), np.dtype(module.param_dtype)  # type: ignore[attr-defined]
    except TypeError:
        return None
    is_default = isinstance(module, nnx.Embed) and found == held
    return None if is_default or not jnp.issubdtype(found, jnp.floating) else found


def _may_differ(module: nnx.Module, own: np.dtype[Any], compute: np.dtype[Any]) -> bool:
    """Whether a layer may compute in a wider dtype: norms have no products, and a product may be marked."""
    wider = own.itemsize > compute.itemsize
    return wider and (isinstance(module, NORMS) or is_exact(getattr(module, "precision", None)))


def _plan_name(dtype: np.dtype[Any]) -> str:
    return next((name for name, known in JAX_DTYPES.items() if np.dtype(known) == dtype), dtype.name)
