"""The plan's words for dtypes, and torch's."""

import torch

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
}
WORD = {dtype: word for word, dtype in TORCH.items()} | {torch.float8_e5m2: "fp8"}
