"""transformers' own `generate` on shards: every rank runs as many forwards as the longest."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from fullshard.on_torch.parallelize.inference import inference


def lockstep_generate(model: nn.Module) -> None:
    """Make a Hugging Face model's own `generate` run until all ranks are done, by default."""
    own = cast(Callable[..., Any] | None, getattr(model, "generate", None))
    if dist.get_world_size() > 1 and callable(own) and hasattr(model, "config") and _takes_synced(own):

        @functools.wraps(own)
        def generate_together(*args: Any, synced_gpus: bool = True, **kwargs: Any) -> Any:
            with inference(model):
                return own(*args, synced_gpus=synced_gpus, **kwargs)

        model.generate = generate_together  # type: ignore[assignment]


def _takes_synced(own: Callable[..., Any]) -> bool:
    """True for the `generate` of Hugging Face and PEFT; other models may have one of their own."""
    return any(p.name == "synced_gpus" or p.kind is p.VAR_KEYWORD for p in inspect.signature(own).parameters.values())
