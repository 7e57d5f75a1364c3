"""Tiny configurations, made by shrinking the default values of a configuration by their names."""

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import zoo_tokens

HIDDEN, HEADS, HEAD, VOCABULARY = 32, 4, 8, 128
LAYERS = r"(layers|layer|blocks|depth|n_layers|hidden_groups|resnets)$|^num_.*layers|^layers_per"
KV_HEADS = r"(key_value|kv).*heads|num_kv|n_kv|query_groups|groups_num|num_key_value"

# Patterns of names, first match first, and the value that a default of that name becomes.
RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (
        r"vocab_size|vocab_size_per_layer_input|group_vocab$|codebook_size|num_embeddings$|(^|_)num_buckets$",
        lambda v: min(v, VOCABULARY),
    ),
    (r"num_queries|num_proposals|two_stage_num", lambda v: min(v, 8)),
    (r"experts_per|moe_k$|topk$|top_k$|num_selected", lambda v: min(v, 2)),
    (r"n_group|topk_group|num_expert_group|n_groups$", lambda v: min(v, 1)),
    (r"shared_experts|dense_replace|num_dense|num_zero", lambda v: min(v, 1)),
    (r"num_.*experts$|n_.*experts$|num_experts", lambda v: min(v, 4)),
    (r"shared_layers", lambda v: 0),
    (r"mamba.*(d_head|head_dim|headdim)$", lambda v: min(v, 16)),  # HEADS of them are twice as wide as HIDDEN
    (r"upsample_groups", lambda v: min(v, HIDDEN)),
    (KV_HEADS, lambda v: min(v, 2)),
    (r"rope_head_dim|rope_dim$|rotary_dim$", lambda v: min(v, 4)),
    (r"(head_dim|d_kv|kv_channels|head_size|v_head_dim|nope_head_dim|attention_head_dim|head_width)$", lambda v: min(v, 8)),
    (r"heads?$|head_count$", lambda v: min(v, HEADS)),
    (LAYERS, lambda v: min(v, 2)),
    (r"positions?$|max_position|max_seq|max_length|seq_len|context_length|seq_length|max_.*len", lambda v: min(v, 64)),
    (r"num_conv_pos_embeddings", lambda v: min(v, 16)),
    (r"conv_pos.*groups", lambda v: min(v, 2)),
    (r"num_pos_feats", lambda v: min(v, HIDDEN // 2)),
    (r"tokens_per_image", lambda v: min(v, 4)),
    (r"latents$", lambda v: min(v, HIDDEN)),
    (r"norm_num_groups|num_groups", lambda v: min(v, 4)),
    (r"image_size|sample_size|img_size|input_size", lambda v: min(v, 32)),
    (r"num_frames|frames", lambda v: min(v, 4)),
    (r"patch_size", lambda v: min(v, 8)),
    (r"lora|_rank$|state_size|d_state", lambda v: min(v, 8)),
    (
        r"intermediate|ffn_dim|d_ff|n_inner|mlp_dim|inner_dim|feed_forward|ffn_hidden|moe_.*size|_inner$|mlp_hidden",
        lambda v: min(v, 48),
    ),
    (
        r"hidden|d_model|n_embd|embed_dim|embedding_dim|embedding_size|embed_size|_dim$|^dim$|channels?$|width|_size$|d_embed|d_inner|units$",
        lambda v: min(v, HIDDEN),
    ),
)
DEPTH = next(i for i, (pattern, _) in enumerate(RULES) if pattern == LAYERS)
ALWAYS = (0, 1)  # vocabularies and queries have no other size that must fit
KEPT = re.compile(
    r"kernel|stride|num_channels|in_channels|(?<!block_)out_channels|window|num_labels|type_vocab|ratio|token_id|token_index|padding|"
    r"num_mel|feat_extract|num_encoder_blocks|chunk|pool|factor|dilation|scale|_every|interval|step|start|lags|size_divisor|merge_size|local_attention"
)
GIVEN = {"prediction_length": 8, "use_qformer_text_input": True}  # without which a model cannot be built
MISSING = {  # what has no default, and without which a model cannot be built
    "vocab_size": VOCABULARY,
    "default_language": "en_XX",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "decoder_hidden_size": HIDDEN,
    "decoder_depth": 1,
    "decoder_num_heads": HEADS,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
OF_TYPE: dict[str, dict[str, Any]] = {  # what no rule can know: values of a type that its defaults do not have
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "blt": {"use_cache": False},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "vitmatte": {"fusion_hidden_sizes": [16, 16, 16, 16]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": HIDDEN},
    "fun_asr_nano": {
        "adaptor_config": {
            "hidden_size": HIDDEN,
            "intermediate_size": HIDDEN // 4,
            "num_attention_heads": HEADS,
            "projector_hidden_size": HIDDEN,
        },
    },
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "lw_detr_vit": {"image_size": 64},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 2 * HIDDEN // HEAD},
    "reformer": {"axial_pos_embds": False},
    "sapiens2": {"head_config": {"upsample_out_channels": [8], "conv_out_channels": [8]}},
    "xlstm": {"hidden_size": 128},  # its heads have multiples of 64
    "glm5_next_text": {"index_topk": 16},
}
COUNT = re.compile(r"^(num_hidden_layers|num_layers|n_layers?)$")
MOST_LAYERS = 4
UNGIVEN = ("layer_types", "transformers_version", "model_type")
DRAWN = re.compile(r"mask_time_prob|mask_feature_prob|spec_augment|layerdrop")  # what draws masks of NumPy's own
AXES = re.compile(r"axes_dims?|rope_axes")  # of positions, which share the width of a head
WIDTHS = re.compile(r"hidden_sizes|embed_dims?|dims|channels|widths?|conv_dim|neck_|planes|embedding_sizes|encoder_hidden|sizes$")
DEPTHS = re.compile(r"depths?|layers|blocks|num_stages|repeat")


def changes(default: Mapping[str, Any], how: str) -> dict[str, Any]:
    """What to change in default values. `how`: `all` sizes, `widths` (all but the number of layers), or only `layers` (their
    number, and the vocabulary)."""
    found: dict[str, Any] = {}
    heads = [v for k, v in default.items() if k.endswith("heads") and not re.search(KV_HEADS, k)]
    for name, value in default.items():
        rule = name
        if re.search(KV_HEADS, name) and value in heads:  # as many as queries have: they still do
            rule = "num_heads"
        elif name == "head_dim" and value == default.get("qk_rope_head_dim"):
            rule = "rope_head_dim"
        new = _changed(rule, value, how)
        if new is not None and new != value:
            found[name] = new
    return found


def _changed(name: str, value: Any, how: str) -> Any:
    if DRAWN.search(name):
        return False if isinstance(value, bool) else 0.0 if isinstance(value, float) else None
    if isinstance(value, bool) or KEPT.search(name):
        return None
    if isinstance(value, int):
        for i, (pattern, change) in enumerate(RULES):
            if re.search(pattern, name):
                depth, always = i == DEPTH, i in ALWAYS
                return change(value) if always or how == "all" or depth == (how == "layers") else None
        return None
    if isinstance(value, list | tuple) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return _list(name, value, how)
    return None


def _list(name: str, values: list[int] | tuple[int, ...], how: str) -> Any:
    kind = list if name.endswith("hidden_sizes") else type(values)  # models add lists to it
    if how == "all" and AXES.search(name) and len(values) <= 4:
        return kind([8 - 2 * (len(values) - 1)] + [2] * (len(values) - 1))  # as much as a head has
    if DEPTHS.search(name):
        return kind(min(v, 2) for v in values) if max(values) < 64 and how != "widths" else None
    if how != "layers" and name.endswith("heads"):
        return kind(min(HEADS, 2**i) for i in range(len(values)))
    if how != "layers" and WIDTHS.search(name) and min(values) > 8:
        return kind(max(8, v * 16 // min(values)) for v in values)
    return None


def tiny(cls: type, how: str = "all") -> Any:
    """A tiny configuration of a class of transformers, with tiny ones inside."""
    made = _shrunk(cls(), how, {})
    zoo_tokens.shrink(made, VOCABULARY)
    return made


def _shrunk(default: Any, how: str, given: dict[str, Any]) -> Any:
    """The configuration with small sizes. `given`: what it is made with besides them. What follows from other values follows
    from the small ones: it is set only if it keeps its size without."""
    values = {k: v for k, v in vars(default).items() if not k.startswith("_")}
    nested = _nested(values)
    plain = {k: v for k, v in values.items() if k not in nested}
    small, own = changes(plain, how), {*_own(type(default)), *given}
    if given.get("out_features"):  # its layers by number
        small = {k: v for k, v in small.items() if not COUNT.search(k)}
    found = given | {k: v for k, v in small.items() if k in own}
    found |= {k: _shrunk(inside, how, _differing(inside)) for k, inside in nested.items()}
    found |= _always(default, plain, how)
    made = _made(default, found)
    lengths = {len(v) for v in plain.values() if isinstance(v, list | tuple)}  # of which a number of layers follows
    free = [k for k in small if k not in found and not (COUNT.search(k) and plain[k] in lengths)]
    left = {k: small[k] for k in free if vars(made).get(k) == plain[k]}
    made = _made(default, found | left) if left else made
    return _with_heads(made)


def _with_heads(config: Any) -> Any:
    """The configuration with the width and the number of heads that a model without them would take."""
    heads, values = getattr(config, "num_attention_heads", None), vars(config)
    if values.get("head_dim", 0) is None and heads:
        config.head_dim = config.hidden_size // heads
    if values.get("num_key_value_heads", 0) is None and heads:
        config.num_key_value_heads = heads
    return config


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    return {k: v for k, v in values.items() if isinstance(v, PreTrainedConfig)}


def _own(cls: type) -> set[str]:
    """The names whose defaults do not follow from others."""
    return {f.name for f in dataclasses.fields(cls) if f.default is not None and f.name not in UNGIVEN}


def _differing(inside: Any) -> dict[str, Any]:
    """What a configuration inside another has besides its defaults."""
    default, own = type(inside)().to_dict(), _own(type(inside))
    kept = {k: v for k, v in inside.to_dict().items() if k in (*vars(inside), "out_features") and k not in UNGIVEN}
    return {k: v for k, v in kept.items() if v != default.get(k) and (k in own or isinstance(v, bool) or not isinstance(v, int))}


def _always(default: Any, values: Mapping[str, Any], how: str) -> dict[str, Any]:
    """What the configuration is made with whatever its sizes are."""
    found = {} if how == "widths" else _layers(values)
    found |= {k: v for k, v in GIVEN.items() if k in values and not values[k]}
    found |= {k: v for k, v in MISSING.items() if k in values and values[k] is None}
    found |= {} if how == "layers" else _sections(default)
    if "vocabulary_map" in values:
        found["vocabulary_map"] = image_words()
    return found | OF_TYPE.get(default.model_type, {})


def _made(default: Any, values: dict[str, Any]) -> Any:
    from transformers import PreTrainedConfig

    try:
        return type(default)(**copy.deepcopy(values))
    except Exception:
        return type(default)(**{k: v.to_dict() if isinstance(v, PreTrainedConfig) else v for k, v in values.items()})


def _layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with a word for each layer, cut to the first layer of each kind and to two layers at least; their number."""
    name, count = next(((k, v) for k, v in values.items() if COUNT.search(k) and isinstance(v, int) and v > 2), ("", 0))
    each = {k: v for k, v in values.items() if isinstance(v, list | tuple) and len(v) == count}
    lists = {k: v for k, v in each.items() if v and all(isinstance(x, str) for x in v)}
    if not lists:
        return {}
    rows = list(zip(*lists.values(), strict=True))
    kinds = sorted({rows.index(row) for row in rows})[:MOST_LAYERS]
    kinds = kinds if len(kinds) > 1 else [kinds[0], kinds[0] + 1]
    return {name: len(kinds)} | {k: [v[i] for i in kinds] for k, v in lists.items()}


def _sections(default: Any) -> dict[str, Any]:
    """The parts of a small head that turn with a place's time, height and width, where a model has such."""
    rope = getattr(default, "rope_parameters", None) or {}
    if "mrope_section" not in (*rope, *getattr(type(default), "ignore_keys_at_rope_validation", ())):
        return {}
    half = int(HEAD * rope.get("partial_rotary_factor", 1)) // 2
    return {"rope_parameters": {**rope, "mrope_section": [half // 3, half // 3, half - 2 * (half // 3)]}}


def image_words() -> dict[str, int]:
    """The words of image codes as Emu3's and Chameleon's vocabularies have them, and of an image's place and its line ends."""
    digits = lambda i: "".join(chr(ord("A") + int(d)) for d in str(i))
    words = {f"<|visual token {i:06d}|>": i for i in range(VOCABULARY)} | {"<image>": 100, "<|extra_200|>": 101}
    return words | {f"IMGIMG{digits(i)}Z": i for i in range(VOCABULARY)}
