"""Tiny configurations, made by shrinking the default values of a configuration by their names."""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN, HEADS, VOCABULARY = 32, 4, 128

# Patterns of names, first match first, and the value that a default of that name becomes.
RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"vocab_size|vocab_size_per_layer_input|codebook_size|num_embeddings$|(^|_)num_buckets$", lambda v: min(v, VOCABULARY)),
    (r"num_queries|num_proposals|two_stage_num", lambda v: min(v, 8)),
    (r"experts_per|topk$|top_k$|num_selected", lambda v: min(v, 2)),
    (r"n_group|topk_group|num_expert_group|n_groups$", lambda v: min(v, 1)),
    (r"shared_experts|dense_replace|num_dense|num_zero", lambda v: min(v, 1)),
    (r"num_.*experts$|n_.*experts$|num_experts", lambda v: min(v, 4)),
    (r"(key_value|kv).*heads|num_kv|n_kv|query_groups|groups_num|num_key_value", lambda v: min(v, 2)),
    (r"rope_head_dim|rope_dim$", lambda v: min(v, 4)),
    (r"(head_dim|d_kv|kv_channels|head_size|v_head_dim|nope_head_dim|attention_head_dim|head_width)$", lambda v: min(v, 8)),
    (r"heads?$|head_count$", lambda v: min(v, HEADS)),
    (r"(layers|layer|blocks|depth|n_layers|hidden_groups|resnets)$|^num_.*layers|^layers_per", lambda v: min(v, 2)),
    (r"positions?$|max_position|max_seq|max_length|seq_len|context_length|seq_length|max_.*len", lambda v: min(v, 64)),
    (r"num_conv_pos_embeddings", lambda v: min(v, 16)),
    (r"conv_pos.*groups", lambda v: min(v, 2)),
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
DEPTH = 10  # of the rules above, the one for the number of layers
ALWAYS = (0, 1)  # vocabularies and queries have no other size that must fit
KEPT = re.compile(
    r"kernel|stride|num_channels|in_channels|(?<!block_)out_channels|window|num_labels|type_vocab|ratio|token_id|token_index|padding|"
    r"num_mel|feat_extract|num_encoder_blocks|chunk|pool|factor|dilation|scale|_every|interval|step|start|lags|size_divisor|merge_size|local_attention"
)
GIVEN = {"prediction_length": 8, "use_qformer_text_input": True}  # without which a model cannot be built
DRAWN = re.compile(r"mask_time_prob|mask_feature_prob|spec_augment|layerdrop")  # what draws masks of NumPy's own
AXES = re.compile(r"axes_dims?|rope_axes")  # of positions, which share the width of a head
WIDTHS = re.compile(r"hidden_sizes|embed_dims?|dims|channels|widths?|conv_dim|neck_|planes|embedding_sizes|encoder_hidden|sizes$")
DEPTHS = re.compile(r"depths?|layers|blocks|num_stages|repeat")


def changes(default: Mapping[str, Any], how: str) -> dict[str, Any]:
    """What to change in default values. `how`: `all` sizes, `widths` (all but the number of layers), or only `layers` (their
    number, and the vocabulary)."""
    found: dict[str, Any] = {}
    for name, value in default.items():
        new = _changed(name, value, how)
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
    kind = type(values)
    if how == "all" and AXES.search(name) and len(values) <= 4:
        return kind([8 - 2 * (len(values) - 1)] + [2] * (len(values) - 1))  # as much as a head has
    if DEPTHS.search(name):
        return kind(min(v, 2) for v in values) if max(values) < 64 and how != "widths" else None
    if how != "layers" and WIDTHS.search(name) and min(values) > 8:
        return kind(max(8, v * 16 // min(values)) for v in values)
    return None


def tiny(cls: type, how: str = "all") -> Any:
    """A tiny configuration of a class of transformers, with tiny ones inside."""
    made = _shrunk(cls(), how, {})
    _small_tokens(made)
    return made


def _shrunk(default: Any, how: str, given: dict[str, Any]) -> Any:
    """The configuration with small sizes. `given`: what it is made with besides them."""
    from transformers import PreTrainedConfig

    values = {k: v for k, v in vars(default).items() if not k.startswith("_")}
    nested = {k: v for k, v in values.items() if isinstance(v, PreTrainedConfig)}
    found = given | changes({k: v for k, v in values.items() if k not in nested}, how)
    for name, inside in nested.items():
        other = inside.to_dict() != type(inside)().to_dict()
        kept = (*vars(inside), "out_features") if other else ()
        found[name] = _shrunk(inside, how, {k: v for k, v in inside.to_dict().items() if k in kept})
    found |= {k: v for k, v in GIVEN.items() if k in values and not values[k]}
    if "vocabulary_map" in values:
        found["vocabulary_map"] = image_words()
    found = {k: v for k, v in found.items() if k not in ("layer_types", "transformers_version", "model_type")}
    try:
        return type(default)(**copy.deepcopy(found))
    except Exception:
        return type(default)(**{k: v.to_dict() if isinstance(v, PreTrainedConfig) else v for k, v in found.items()})


def image_words() -> dict[str, int]:
    """The words of image codes as Emu3's and Chameleon's vocabularies have them, and of an image's place and its line ends."""
    digits = lambda i: "".join(chr(ord("A") + int(d)) for d in str(i))
    words = {f"<|visual token {i:06d}|>": i for i in range(VOCABULARY)} | {"<image>": 100, "<|extra_200|>": 101}
    return words | {f"IMGIMG{digits(i)}Z": i for i in range(VOCABULARY)}


def _small_tokens(config: Any) -> None:
    """Token numbers below the vocabulary. That of an image or sound, where it is missing."""
    ids = {k: v for k, v in vars(config).items() if re.search(r"token_(id|index)$", k)}
    large = [k for k, v in ids.items() if isinstance(v, int) and v >= VOCABULARY]
    missing = [k for k, v in ids.items() if v is None and re.search("image|audio|video", k)]
    for i, name in enumerate(sorted([*large, *missing])):
        setattr(config, name, 100 + i % 20)
