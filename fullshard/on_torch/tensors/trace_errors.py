"""What is wrong with a model that cannot be traced, and where."""

import traceback
from pathlib import Path

import torch

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))  # torch and this package
# What a model may raise for a batch shape that it does not support.
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, NameError, ArithmeticError, AssertionError, AttributeError)
# What torch says when code asks a meta tensor for its values.
NO_VALUES = ("meta tensor", "item()", "Cannot copy out of meta", "numpy", "data-dependent", "aten::_local_scalar_dense")


def reads_values(error: BaseException) -> bool:
    """True if the model asked for values of tensors, which a trace does not have."""
    return any(words in str(error) for words in NO_VALUES)


def model_line(error: BaseException) -> str:
    """The innermost line of code outside torch and fullshard that led to the error; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*LIBRARIES, "<")):
            code = f" `{frame.line}`" if frame.line else ""
            return f"{Path(frame.filename).name} line {frame.lineno}{code}"
    return ""
