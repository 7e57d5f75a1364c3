"""The plan's words for dtypes, and torch's."""

import torch

from fullshard.errors import FullshardError

TORCH = {
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
_WORD = {dtype: word for word, dtype in TORCH.items()} | {torch.float8_e5m2: "fp8"}


def word(name: str, dtype: torch.dtype) -> str:
    """The plan's word for the dtype of the tensor called `name`."""
    if dtype not in _WORD:
        raise FullshardError(f"{name} is {str(dtype)[6:]}, a dtype fullshard has no word for; convert it first")
    return _WORD[dtype]
