"""What transformers' own tables know of a model: its class, its head, and whether it reads texts as a whole."""

from typing import Any, Literal

from torch import nn

from fullshard.on_torch.model.lora import without_adapters

Objective = Literal["causal", "masked", "seq2seq", "classify", "image"]

# transformers' tables of classes, MODEL_FOR_…_MAPPING_NAMES. A class may be in several: the first counts.
TABLES: tuple[tuple[Objective, tuple[str, ...]], ...] = (
    ("seq2seq", ("SEQ_TO_SEQ_CAUSAL_LM",)),
    ("causal", ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")),
    ("masked", ("MASKED_LM",)),
    ("classify", ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION")),
    ("image", ("IMAGE_CLASSIFICATION",)),
)


def objective_of(model: nn.Module) -> Objective | None:
    """What the model's head predicts: `causal` (the next token), `masked` (tokens that are hidden), `seq2seq` (another
    text), `classify` (classes of texts or tokens) or `image` (classes of images).

    Models that are not of transformers count as `causal`. None for one of transformers with another head, or none.
    """
    names = transformers_classes(model)
    if not names:
        return "causal"
    found = next((objective for objective, tables in TABLES if names & _classes(tables)), None)
    config = getattr(without_adapters(model), "config", None)
    if found == "causal" and getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    if found == "causal" and sees_whole_text(config):
        return "masked"
    return found


def transformers_classes(model: nn.Module) -> set[str]:
    """The names of the model's class and its bases, as far as they are of transformers. FSDP derives a class of its own."""
    kinds = type(without_adapters(model)).__mro__
    return {kind.__name__ for kind in kinds if kind.__module__.startswith("transformers.models.")}


def class_name(model: nn.Module) -> str:
    """The model's class as its author calls it."""
    kinds = type(without_adapters(model)).__mro__
    return next(k.__name__ for k in kinds if not (k.__module__.startswith("torch.distributed") or k.__name__.startswith("FSDP")))


def no_head(model: nn.Module, purpose: str) -> str:
    """The sentence about a model without the head for a loss. It names the classes that have one."""
    config = getattr(without_adapters(model), "config", None)
    model_type, tables = getattr(config, "model_type", None), [t for _, names in TABLES for t in names]
    if sees_whole_text(config):
        tables.remove("CAUSAL_LM")
    found = [n for n in (_table(t).get(model_type) for t in tables) if isinstance(n, str)]
    write = f'; write one that has it into config.json, "architectures": ["{found[0]}"]' if found else ""
    more = f" (or {', '.join(found[1:])})" if found[1:] else ""
    return f"{class_name(model)} has no head that {purpose}{write}{more}, or give a loss of your own"


def sees_whole_text(config: Any) -> bool:
    """True if a model that could be causal is not: its config leaves `is_decoder` false, so tokens see later ones."""
    return getattr(config, "is_decoder", None) is False and getattr(config, "model_type", None) in _table("MASKED_LM")


def _table(name: str) -> dict[Any, Any]:
    """transformers' table of classes by model type."""
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {})


def _classes(tables: tuple[str, ...]) -> set[str]:
    """The names of all classes in these of transformers' tables."""
    found = [names for table in tables for names in _table(table).values()]
    return {n for names in found for n in ([names] if isinstance(names, str) else names)}
