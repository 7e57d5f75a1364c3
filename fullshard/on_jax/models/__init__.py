"""Built-in models on Flax NNX. Parameters have the names and layouts of the torch models of the same size."""

from fullshard.on_jax.models.nnx_gpt import NnxGPT
from fullshard.on_jax.models.nnx_llama import NnxLlama

__all__ = ["NnxGPT", "NnxLlama"]
