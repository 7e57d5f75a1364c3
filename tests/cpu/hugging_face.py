"""Small Hugging Face models, built from configs on meta; runs inside ranks."""

import torch

import fullshard as fs
from fullshard import FullshardError, on_torch
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


def build(name: str, *, lora: bool = False) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(name)).train()
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    return model


def plain(name: str, *, lora: bool = False) -> torch.nn.Module:
    model = build(name, lora=lora)
    on_torch.initialize(model, torch.device("cpu"), seed=7)
    return model


def oracle(name: str, parts: int, clip: float | None, lora: bool):
    return parity.unsharded(name, parts, clip, model=plain(name, lora=lora))


def errors(name: str, case: parity.Case, *, lora: bool = False) -> dict:
    """As `parity.errors`, for a Hugging Face model; distances of all parameters, and of the model as a whole."""
    want_losses, want_norms, want = parity.from_first(oracle, name, parity.parts(case), case.clip, lora)
    losses, norms, params = parity.sharded(case, build(name, lora=lora))
    square = {n: float((params[n] - want[n]).double().square().sum()) for n in want}
    return {
        "loss": parity.relative(losses, want_losses),
        "norm": parity.relative(norms, want_norms),
        "params": parity.distance(params, want),
        "whole": (sum(square.values()) / sum(float(p.double().square().sum()) for p in want.values())) ** 0.5,
    }


def movement(name: str) -> dict[str, float]:
    """How far the oracle's own weights moved."""
    model = plain(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    _, _, after = parity.unsharded(name, 1, model=model)
    return parity.distance(after, before)


def refusal(name: str, case: parity.Case) -> str:
    try:
        parity.sharded(case, build(name))
    except FullshardError as error:
        return str(error)
    return "no refusal"


def keeps_values() -> dict[str, float]:
    """A model that already has weights (loaded, say) is sharded with them."""
    model = plain("llama")
    want = {n: p.detach().clone() for n, p in model.named_parameters()}
    plan = fs.zero3(on_torch.describe(model), devices=2)
    state = on_torch.shard(model, plan, seed=99)
    return parity.distance({n: p.full_tensor().detach() for n, p in state.model.named_parameters()}, want)
