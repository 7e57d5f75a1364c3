"""The dtypes of plans and of checkpoints, as JAX calls them."""

import jax.numpy as jnp
import numpy as np

from fullshard.errors import FullshardError

JAX_DTYPES = {"fp64": jnp.float64, "fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


def plan_dtype_name(name: str, dtype: object) -> str:
    """A dtype as a plan calls it."""
    for known, its in JAX_DTYPES.items():
        if np.dtype(its) == dtype:
            return known
    raise FullshardError(f"{name} is {dtype}, and parameters are {', '.join(JAX_DTYPES)}; make it a plain Variable, not a Param")
