"""Built-in models: plain modules, written without any sharding."""

from torch import nn

from fullshard.model.presets import LlamaSize, preset
from fullshard.on_torch.model.built_in.gpt import GPT
from fullshard.on_torch.model.built_in.llama import Llama

__all__ = ["GPT", "Llama", "build"]


def build(name: str) -> nn.Module:
    """Build the preset `name` on the default device (usually `meta`)."""
    size = preset(name)
    return Llama(size) if isinstance(size, LlamaSize) else GPT(size)
