"""Safe loading of a Hugging Face config.json: only models that transformers itself implements, of a size that can be built.

A config is untrusted input. Loading one runs no code from its directory, fetches nothing and prompts for nothing. Keys
that ask for any of these are refused by name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from fullshard.base.errors import FullshardError, nearest
from fullshard.model.hf_directory import REFUSED_KEYS, parse_config
from fullshard.on_torch.model.model_head import sees_whole_text

MAX_MODULES = 200_000
MAX_INTEGER = 2**31 - 1  # meta tensors take no memory, but torch cannot represent larger sizes
# Limits for keys that contain one of these words: the model's constructor loops over such counts.
MAX_COUNTS = {("layer", "depth", "block", "expert", "head", "stage", "hop"): 1 << 20, ("position", "ctx", "seq"): 1 << 24}
ATTENTION_KEYS = ("_attn_implementation", "attn_implementation", "_attn_implementation_internal")
EXPERT_KEYS = ("_experts_implementation", "experts_implementation", "_experts_implementation_internal")
ATTENTION_KERNELS, EXPERT_KERNELS = {"eager", "sdpa", "flex_attention"}, {"eager", "grouped_mm", "batched_mm"}
FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
REFUSED_HERE = REFUSED_KEYS | {
    "use_kernels": "asks for kernels from the hub, which are not fetched; remove the key",
    "kernel_config": "asks for kernels from the hub, which are not fetched; remove the key",
    "use_pretrained_backbone": "asks for pretrained weights from the hub, which are not fetched; write false",
}


def read_config(path: Path) -> dict[str, Any]:
    """Parse a config.json. Raises if it is not a JSON object, or has a key that is refused."""
    found = parse_config(path)
    for key, value in _pairs(found):
        if why := _objection(key, value):
            shown = key if isinstance(value, dict | list) else f"{key} = {value!r}"
            raise FullshardError(f"{path}: {shown} {why}")
    return found


def _pairs(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All (key, value) pairs, nested configs included. The items of a list have the list's key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name, inner
            yield from _pairs(inner, name)
    elif isinstance(value, list):
        for inner in value:
            if not isinstance(inner, list):
                yield key, inner
            yield from _pairs(inner, key)


def _objection(key: str, value: Any) -> str | None:
    """Why a key with this value is refused; None if it is accepted."""
    if not value:
        return None
    if key in REFUSED_HERE:
        return REFUSED_HERE[key]
    if key in ATTENTION_KEYS:
        flash = {name for name, package in FLASH_PACKAGES.items() if find_spec(package) is not None}
        return _other_kernel(value, ATTENTION_KERNELS | flash)
    if key in EXPERT_KEYS:
        return _other_kernel(value, EXPERT_KERNELS)
    return _too_large(key, value) if type(value) is int else None


def _other_kernel(value: Any, known: set[str]) -> str | None:
    """Refuse a kernel that is not installed: transformers would fetch it from the hub."""
    if all(isinstance(name, str) and name in known for name in (value.values() if isinstance(value, dict) else [value])):
        return None
    return f"asks for a kernel that is not installed, and kernels are not fetched; write one of {', '.join(sorted(known))}"


def _too_large(key: str, value: int) -> str | None:
    most = min((n for words, n in MAX_COUNTS.items() if any(word in key for word in words)), default=MAX_INTEGER)
    return f"is more than a model can have; write at most {most}" if abs(value) > most else None


# -- building ----------------------------------------------------------------------------------------------


def model_builder(config_path: Path) -> Callable[[], nn.Module]:
    """A function that builds the model of a config, without pretrained weights."""
    read_config(config_path)
    try:
        from transformers import AutoConfig
    except ImportError:
        raise FullshardError("Hugging Face models need transformers: pip install 'fullshard[hf]'") from None
    with _offline():
        config = AutoConfig.from_pretrained(config_path, trust_remote_code=False, local_files_only=True)
        kind = _model_class(config_path, config)

    def build() -> nn.Module:
        with _offline(), _module_limit(config_path):
            return kind._from_config(_own_config(kind, config))

    return build


def _model_class(path: Path, config: Any) -> Any:
    """The class that the config's `architectures` names. Without it the causal one of the model type, unless that sees the
    whole text, else the base model."""
    wanted = config.architectures
    if wanted and not (isinstance(wanted, list) and isinstance(wanted[0], str)):
        raise FullshardError(f'{path}: architectures = {wanted!r} is no list of names; write ["LlamaForCausalLM"], for example')
    known = _known_classes(config)
    if wanted:
        if wanted[0] not in known:
            raise FullshardError(
                f"{path}: architectures names {wanted[0]!r}, which is no class of transformers for model_type "
                f"{config.model_type!r}{nearest(wanted[0], list(known))} (it has {', '.join(known) or 'none'})"
            )
        return known[wanted[0]]
    causal = _mapped("MODEL_FOR_CAUSAL_LM_MAPPING", config)
    base = _mapped("MODEL_MAPPING", config)
    if causal and not sees_whole_text(config) and not getattr(config, "is_encoder_decoder", False):
        return causal[0]
    if not base:
        raise FullshardError(
            f'{path} has no architectures; write "architectures": [NAME] with one of {", ".join(known) or "none"}'
        )
    return base[0]


def _known_classes(config: Any) -> dict[str, Any]:
    """All classes of the installed transformers for this type of config, those with a head first."""
    from transformers.models.auto import modeling_auto

    tables = [name for name in vars(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING")]
    tables.sort(key=lambda name: name == "MODEL_MAPPING")
    return {kind.__name__: kind for name in tables for kind in _mapped(name, config)}


def _mapped(table: str, config: Any) -> list[Any]:
    """The classes of a table of transformers for this config; only those that transformers itself has."""
    from transformers.models.auto import modeling_auto

    mapping = getattr(modeling_auto, table, {})
    found = mapping.get(type(config), ())
    kinds = found if isinstance(found, list | tuple) else (found,)
    return [kind for kind in kinds if kind.__module__.startswith("transformers.")]


def _own_config(kind: Any, config: Any) -> Any:
    """The part of a config that a class takes: that of the text, for the language model of a larger one."""
    text = getattr(config, "sub_configs", {}).get("text_config")
    return config.get_text_config() if text is not None and getattr(kind, "config_class", None) is text else config


@contextmanager
def _offline() -> Iterator[None]:
    """Inside, neither transformers nor the libraries it calls access the hub."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _module_limit(path: Path) -> Iterator[None]:
    """Inside, raise when more than MAX_MODULES modules are created, whichever key of the config multiplies them."""
    made = 0

    def count(module: nn.Module, name: str, inner: nn.Module | None) -> None:
        nonlocal made
        made += 1
        if made > MAX_MODULES:
            raise FullshardError(f"{path} describes a model of more than {MAX_MODULES:,} modules; write fewer layers")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
