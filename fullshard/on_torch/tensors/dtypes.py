"""The names that plans and safetensors files have for torch's dtypes."""

import torch

from fullshard.base.errors import FullshardError

PLAN_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
_PLAN_NAMES = {dtype: name for name, dtype in PLAN_DTYPES.items()} | {torch.float8_e5m2: "fp8"}

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def plan_dtype_name(tensor: str, dtype: torch.dtype) -> str:
    """The plan's name for a dtype. `tensor` is the name of the tensor that an error mentions."""
    if dtype not in _PLAN_NAMES:
        raise FullshardError(f"{tensor} is {str(dtype)[6:]}, a dtype that fullshard does not support; convert it first")
    return _PLAN_NAMES[dtype]
