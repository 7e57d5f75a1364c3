"""Optimizers of the caller's own: what torch says of their first step on shards, in a sentence."""

import functools
import traceback
from types import MethodType
from typing import Any

import torch

from fullshard.base.errors import FullshardError, first_line


def explain_steps(optimizer: torch.optim.Optimizer) -> None:
    """Until a step succeeds, name the cause and what to do if one fails because parameters are shards."""
    step, worked = optimizer.step, False

    @functools.wraps(step)
    def explained_step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal worked
        try:
            result = step(*args, **kwargs)
        except Exception as error:
            if worked or not _of_shards(error):
                raise
            raise _unfit(optimizer, error) from error
        worked = True
        return result

    optimizer.step = MethodType(explained_step, optimizer)  # type: ignore[method-assign]  # a method: schedulers ask for __func__


def _of_shards(error: Exception) -> bool:
    """True if DTensor has raised this, or the compiler while it looked at one."""
    if isinstance(error, FullshardError | torch.OutOfMemoryError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return "DTensor" in str(error) or any("torch/distributed/tensor/" in f.filename.replace("\\", "/") for f in frames)


def _unfit(optimizer: torch.optim.Optimizer, error: Exception) -> FullshardError:
    kind = type(optimizer).__name__
    return FullshardError(
        f"{kind} cannot update shards ({first_line(error)[:200]}): each rank holds a part of every parameter, as a DTensor whose "
        "gradient is reduced already; use an optimizer that works element by element, such as "
        "shard(..., optimizer=fullshard.AdamW(lr=...)), without buffers, collectives or products of whole matrices of its own"
    )
