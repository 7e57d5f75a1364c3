"""Small Hugging Face models, built from configs on meta; runs inside ranks."""

import torch

from tests.cpu import parity


def config(name: str):
    from transformers import Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config

    common = {
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 44,  # grouped matrix products of experts need rows of 16 bytes
        "vocab_size": parity.VOCAB,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    small = {
        "n_embd": 24,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": parity.VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {
        "llama": lambda: LlamaConfig(**common),
        "qwen2": lambda: Qwen2Config(**common),
        "qwen3": lambda: Qwen3Config(**common),
        "gemma2": lambda: Gemma2Config(**common, query_pre_attn_scalar=6),
        "gemma3": lambda: Gemma3TextConfig(**common, query_pre_attn_scalar=6),
        "gpt2": lambda: GPT2Config(**small, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        "mixtral": lambda: MixtralConfig(**common, num_local_experts=4),
    }[name]()


def build(name: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(name)).train()


def errors(name: str, case: parity.Case) -> dict:
    """As `parity.errors`, for a Hugging Face model: no edit to the model anywhere."""
    from fullshard import on_torch

    plain = build(name)
    on_torch.initialize(plain, [], torch.device("cpu"), seed=7)
    want_losses, want_norms, want_params = parity.unsharded(name, case.clip, plain)
    losses, norms, params = parity.sharded(case, build(name))
    found = parity.distance(params, want_params)
    worst = max(found, key=found.__getitem__)
    return {
        "loss": parity.relative(losses, want_losses),
        "norm": parity.relative(norms, want_norms),
        "param": found[worst],
        "worst": worst,
    }
