"""Built-in models: plain modules that know nothing of sharding."""

from torch import nn

from fullshard.model.presets import LlamaSize, preset
from fullshard.on_torch.models.gpt import GPT
from fullshard.on_torch.models.llama import Llama

__all__ = ["GPT", "Llama", "build"]


def build(name: str) -> nn.Module:
    """The preset called `name`, on whatever device is the default (`meta`, usually)."""
    size = preset(name)
    return Llama(size) if isinstance(size, LlamaSize) else GPT(size)
