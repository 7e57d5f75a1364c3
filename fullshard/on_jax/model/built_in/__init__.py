"""Built-in models on Flax NNX. Parameters have the names and layouts of the torch models of the same size."""

from fullshard.on_jax.model.built_in.nnx_gpt import NnxGPT
from fullshard.on_jax.model.built_in.nnx_gpt2 import NnxGPT2, NnxGPT2Size
from fullshard.on_jax.model.built_in.nnx_llama import NnxLlama, NnxLlamaSize

__all__ = ["NnxGPT", "NnxGPT2", "NnxGPT2Size", "NnxLlama", "NnxLlamaSize"]
