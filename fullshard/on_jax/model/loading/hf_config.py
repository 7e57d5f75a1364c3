"""Reads a Hugging Face config.json into the size of an NNX model, without transformers.

A field that changes what the model computes, and that no NNX model has, is refused by name. Fields that transformers itself
ignores for the model are ignored here. A config is untrusted input: no code of its directory runs, and sizes are limited.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fullshard.base.errors import FullshardError, is_number, nearest
from fullshard.model.hf_directory import REFUSED_KEYS, parse_config
from fullshard.on_jax.model.built_in.layers import ACTIVATIONS
from fullshard.on_jax.model.built_in.nnx_gpt2 import NnxGPT2Size
from fullshard.on_jax.model.built_in.nnx_llama import NnxLlamaSize
from fullshard.on_jax.model.built_in.rope import ROPE_KINDS, RopeScaling, yarn_cos_sin_factor

MOST = 2**31 - 1
MOST_LAYERS = 10_000
TORCH = "the JAX engine does not build it; use the torch engine, which does"
# What no model here has, and the values with which a field asks for nothing.
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{key: (why, (None, {})) for key, why in REFUSED_KEYS.items()},
    "per_layer_config": (TORCH, (None, {})),
    "is_encoder_decoder": (TORCH, (None, False)),
    "add_cross_attention": (TORCH, (None, False)),
    "is_causal": (TORCH, (None, True)),
    "partial_rotary_factor": (TORCH, (None, 1)),
}

Size = NnxLlamaSize | NnxGPT2Size


@dataclass(frozen=True)
class Family:
    """A model type of transformers: its causal class, the defaults of its config class, and how its size is read."""

    architecture: str
    defaults: Mapping[str, Any]
    read: Callable[["ConfigFields"], Size]


class ConfigFields:
    """The fields of one config, read with the defaults of its family. Raises a sentence that names the field."""

    def __init__(self, path: Path, given: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.path, self.given, self.defaults = path, given, defaults

    def get(self, key: str) -> Any:
        return self.given.get(key, self.defaults.get(key))

    def refuse(self, key: str, why: str) -> NoReturn:
        value = self.get(key)
        shown = key if isinstance(value, dict | list) else f"{key} = {value!r}"
        raise FullshardError(f"{self.path}: {shown}{'' if key in self.given else ' (the default)'}: {why}")

    def count(self, key: str, most: int = MOST) -> int:
        value = self.get(key)
        if type(value) is not int or not 1 <= value <= most:
            self.refuse(key, f"write a whole number from 1 to {most}")
        return value

    def number(self, key: str, most: float = math.inf) -> float:
        value = self.get(key)
        if not is_number(value) or not 0 <= value <= most:
            self.refuse(key, "write a number of at least 0" + (f" and at most {most}" if most < math.inf else ""))
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            self.refuse(key, "write true or false")
        return value

    def activation(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self.refuse(key, TORCH)
        return value


def read_size(path: Path) -> Size:
    """The size of the model that a config.json describes."""
    given = parse_config(path)
    kind = given.get("model_type")
    if not isinstance(kind, str):
        raise FullshardError(f"{path} has no model_type; write the config.json that save_pretrained wrote")
    if kind not in FAMILIES:
        raise FullshardError(
            f"{path}: model_type = {kind!r}: the JAX engine builds {', '.join(FAMILIES)}{nearest(kind, list(FAMILIES))}; use the "
            "torch engine, which builds what transformers has, or write the model in NNX as file.py:callable"
        )
    family = FAMILIES[kind]
    fields = ConfigFields(path, given, family.defaults)
    wanted = given.get("architectures")
    if wanted and wanted != [family.architecture]:
        fields.refuse("architectures", f"the JAX engine builds {family.architecture}, not {_shown(wanted)}; use the torch engine")
    for key, (why, neutral) in REFUSED.items():
        if given.get(key) not in neutral:
            fields.refuse(key, why)
    return family.read(fields)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else repr(value)


# -- Llama and its relatives -------------------------------------------------------------------------------------


def _llama(fields: ConfigFields) -> NnxLlamaSize:
    bias = fields.flag("attention_bias")
    return _decoder(fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _mistral(fields: ConfigFields) -> NnxLlamaSize:
    if fields.get("sliding_window") is not None:
        fields.refuse("sliding_window", f"{TORCH}, or write null if no text is longer")
    return _decoder(fields)


def _qwen2(fields: ConfigFields) -> NnxLlamaSize:
    _refuse_window(fields)
    return _decoder(fields, qkv_bias=True)


def _qwen3(fields: ConfigFields) -> NnxLlamaSize:
    _refuse_window(fields)
    bias = fields.flag("attention_bias")
    return _decoder(fields, qkv_bias=bias, output_bias=bias, norm_heads=True)


def _refuse_window(fields: ConfigFields) -> None:
    if fields.get("use_sliding_window"):
        fields.refuse("use_sliding_window", TORCH)


def _decoder(fields: ConfigFields, **variant: bool) -> NnxLlamaSize:
    """What all of them have. `variant`: the fields of the size in which they differ."""
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention"}):
        fields.refuse("layer_types", f"only full_attention is built; {TORCH}")
    dim, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = heads if fields.get("num_key_value_heads") is None else fields.count("num_key_value_heads")
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"write a divisor of num_attention_heads = {heads}")
    head_size = None if fields.get("head_dim") is None else fields.count("head_dim")
    if head_size is None and dim % heads:
        fields.refuse("hidden_size", f"write a multiple of num_attention_heads = {heads}, or head_dim")
    if (head_size or dim // heads) % 2:
        fields.refuse("head_dim" if head_size else "hidden_size", "rotary positions need an even head_dim; write one")
    theta, rope = _rope(fields)
    return NnxLlamaSize(
        dim=dim,
        layers=fields.count("num_hidden_layers", MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        ffn=fields.count("intermediate_size"),
        vocab=fields.count("vocab_size"),
        sequence=fields.count("max_position_embeddings"),
        theta=theta,
        eps=fields.number("rms_norm_eps"),
        tied=fields.flag("tie_word_embeddings"),
        head_size=head_size,
        activation=fields.activation("hidden_act"),
        attention_dropout=0.0 if fields.get("attention_dropout") is None else fields.number("attention_dropout", 1),
        padding=_padding(fields),
        std=fields.number("initializer_range"),
        rope=rope,
        **variant,
    )


def _padding(fields: ConfigFields) -> int | None:
    """The padding token; torch counts a negative one from the end of the vocabulary."""
    token, vocab = fields.get("pad_token_id"), fields.count("vocab_size")
    if token is None:
        return None
    if type(token) is not int or not -vocab <= token < vocab:
        fields.refuse("pad_token_id", f"write null or a token below vocab_size = {vocab}")
    return token % vocab


def _rope(fields: ConfigFields) -> tuple[float, RopeScaling]:
    """The base of rotary frequencies, and how they are scaled. `rope_scaling` is the older name of `rope_parameters`."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    found = fields.get(key) or {}
    if not isinstance(found, dict):
        fields.refuse(key, "write an object with rope_type, or null")
    given = {"rope_theta": fields.given.get("rope_theta", 10_000.0)} | found
    kind = given.get("rope_type", given.get("type", "default"))
    nested = any(isinstance(value, dict) for value in given.values())
    if nested or kind not in ROPE_KINDS or given.get("partial_rotary_factor") not in (None, 1):
        asked = "a table for each kind of layer" if nested else f"rope_type = {kind!r}"
        fields.refuse(key, f"{asked} is not among {', '.join(ROPE_KINDS)} of a whole head: {TORCH}")
    inside = ConfigFields(fields.path, given, {})
    theta = inside.number("rope_theta")
    if theta <= 1:
        inside.refuse("rope_theta", "write a number above 1")
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", _factor(inside))
    longest = fields.count("max_position_embeddings")
    inside.given = given | {"original_max_position_embeddings": _original_length(fields, given, longest)}
    length = inside.count("original_max_position_embeddings")
    if kind == "llama3":
        low, high = inside.number("low_freq_factor"), inside.number("high_freq_factor")
        if not 0 < low < high:
            inside.refuse("high_freq_factor", f"write a number above low_freq_factor = {low}, which must be above 0")
        return theta, RopeScaling("llama3", _factor(inside), length, low, high)
    return theta, _yarn(inside, length, longest)


def _original_length(fields: ConfigFields, given: Mapping[str, Any], longest: int) -> Any:
    """The length of the texts of the first training. A field of the config itself counts most."""
    otherwise = given.get("original_max_position_embeddings", longest)
    return fields.given.get("original_max_position_embeddings", otherwise)


def _factor(inside: ConfigFields) -> float:
    factor = inside.number("factor")
    if not factor:
        inside.refuse("factor", "write a number above 0")
    return factor


def _yarn(inside: ConfigFields, length: int, longest: int) -> RopeScaling:
    asked = lambda key, otherwise: inside.number(key) if inside.get(key) else otherwise
    factor = longest / length if "factor" in inside.given and inside.get("factor") is None else _factor(inside)
    own = yarn_cos_sin_factor(factor, asked("mscale", None), asked("mscale_all_dim", None))
    return RopeScaling(
        "yarn",
        factor,
        length,
        beta_fast=asked("beta_fast", 32.0),
        beta_slow=asked("beta_slow", 1.0),
        truncate=inside.flag("truncate") if "truncate" in inside.given else True,
        cos_sin_factor=own if inside.get("attention_factor") is None else inside.number("attention_factor"),
    )


# -- GPT-2 ---------------------------------------------------------------------------------------------------------

OTHER_NAMES = {  # that transformers reads, too
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def _gpt2(fields: ConfigFields) -> NnxGPT2Size:
    fields.given = {OTHER_NAMES.get(key, key): value for key, value in fields.given.items()}
    dim, heads = fields.count("n_embd"), fields.count("n_head")
    if dim % heads:
        fields.refuse("n_embd", f"write a multiple of n_head = {heads}")
    return NnxGPT2Size(
        dim=dim,
        layers=fields.count("n_layer", MOST_LAYERS),
        heads=heads,
        ffn=4 * dim if fields.get("n_inner") is None else fields.count("n_inner"),
        vocab=fields.count("vocab_size"),
        sequence=fields.count("n_positions"),
        activation=fields.activation("activation_function"),
        eps=fields.number("layer_norm_epsilon"),
        tied=fields.flag("tie_word_embeddings"),
        embedding_dropout=fields.number("embd_pdrop", 1),
        attention_dropout=fields.number("attn_pdrop", 1),
        residual_dropout=fields.number("resid_pdrop", 1),
        scale_by_head=fields.flag("scale_attn_weights"),
        scale_by_layer=fields.flag("scale_attn_by_inverse_layer_idx"),
        std=fields.number("initializer_range"),
    )


# -- the defaults of transformers' config classes ------------------------------------------------------------------

_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "pad_token_id": None,
}
_LLAMA = _COMMON | {
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": None,
}
_MISTRAL = _COMMON | {
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "head_dim": None,
}
_QWEN2 = _COMMON | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
}
_QWEN3 = _QWEN2 | {"head_dim": 128, "attention_bias": False}
_GPT2: dict[str, Any] = {
    "vocab_size": 50_257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", _LLAMA, _llama),
    "mistral": Family("MistralForCausalLM", _MISTRAL, _mistral),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN2, _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _QWEN3, _qwen3),
    "gpt2": Family("GPT2LMHeadModel", _GPT2, _gpt2),
}
