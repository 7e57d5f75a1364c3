"""The dtypes of plans and of checkpoints, as JAX calls them."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fullshard.base.errors import FullshardError

Shape = tuple[int, ...]

JAX_DTYPES = {"fp64": jnp.float64, "fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
# By the names of safetensors.
FILE_DTYPES: dict[str, Any] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}  # fmt: skip
FILE_DTYPE_NAMES = {dtype: name for name, dtype in FILE_DTYPES.items()}


def plan_dtype_name(name: str, dtype: object) -> str:
    """A dtype as a plan calls it."""
    for known, its in JAX_DTYPES.items():
        if np.dtype(its) == dtype:
            return known
    raise FullshardError(f"{name} is {dtype}, and parameters are {', '.join(JAX_DTYPES)}; make it a plain Variable, not a Param")


def safetensors_name(name: str, dtype: Any) -> str:
    """A dtype as safetensors calls it. `name`: of the array, for the error."""
    if np.dtype(dtype) not in FILE_DTYPE_NAMES:
        raise FullshardError(f"{name} is {dtype}, which safetensors does not support; convert it first")
    return FILE_DTYPE_NAMES[np.dtype(dtype)]
