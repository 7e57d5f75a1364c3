"""What a Hugging Face config.json may ask for: a model of transformers' own, of a size that can be built. Nothing else.

A config is a file by somebody else. No code of its directory runs, nothing is fetched because of it, nobody is asked a
question, and each key that would want that is refused by name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from fullshard.errors import FullshardError
from fullshard.reading import parse_json, read_text

MOST_BYTES = 16 << 20
MOST_MODULES = 200_000
LARGEST = 2**31 - 1  # of any whole number: tensors on meta take no memory, but their sizes must be numbers to torch
# Of numbers whose key says what is counted one by one while a model is built.
COUNTED = {("layer", "depth", "block", "expert", "head", "stage", "hop"): 1 << 20, ("position", "ctx", "seq"): 1 << 24}
ATTENTION = ("_attn_implementation", "attn_implementation", "_attn_implementation_internal")
EXPERTS = ("_experts_implementation", "experts_implementation", "_experts_implementation_internal")
OWN_CODE, OWN_EXPERTS = {"eager", "sdpa", "flex_attention"}, {"eager", "grouped_mm", "batched_mm"}
FLASH = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
REFUSED = {
    "auto_map": "names code of the model's own, which is not run; remove the key to use the model of transformers itself",
    "quantization_config": "asks for quantised weights, which cannot be trained; use the model's unquantised directory",
    "use_kernels": "asks for kernels from the hub, which are not fetched; remove the key",
    "kernel_config": "asks for kernels from the hub, which are not fetched; remove the key",
    "use_pretrained_backbone": "asks for weights that would be fetched, which they are not; write false",
}


def read_config(path: Path) -> dict[str, Any]:
    """A config.json, if it asks for nothing that is not given."""
    text = read_text(path, "config", MOST_BYTES)
    try:
        found = parse_json(text)
    except FullshardError as error:
        raise FullshardError(f"{path} is not a Hugging Face config: {error}") from None
    if not isinstance(found, dict):
        raise FullshardError(f"{path} is not a Hugging Face config: it is a JSON {type(found).__name__}, not an object")
    for key, value in _pairs(found):
        if why := _objection(key, value):
            raise FullshardError(f"{path}: {key} = {value!r} {why}" if _short(value) else f"{path}: {key} {why}")
    return found


def _pairs(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its value, those of configs inside a config too; an item of a list has the list's key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name, inner
            yield from _pairs(inner, name)
    elif isinstance(value, list):
        for inner in value:
            if not isinstance(inner, list):
                yield key, inner
            yield from _pairs(inner, key)


def _short(value: Any) -> bool:
    return not isinstance(value, dict | list)


def _objection(key: str, value: Any) -> str | None:
    if not value:
        return None
    if key in REFUSED:
        return REFUSED[key]
    if key in ATTENTION:
        return _other_kernel(value, OWN_CODE | {name for name, package in FLASH.items() if find_spec(package) is not None})
    if key in EXPERTS:
        return _other_kernel(value, OWN_EXPERTS)
    return _too_large(key, value) if type(value) is int else None


def _other_kernel(value: Any, known: set[str]) -> str | None:
    """A kernel of a name that transformers would look for on the hub; what is installed is known by others."""
    if all(isinstance(name, str) and name in known for name in (value.values() if isinstance(value, dict) else [value])):
        return None
    return f"asks for a kernel that would be fetched, which it is not; write one of {', '.join(sorted(known))}"


def _too_large(key: str, value: int) -> str | None:
    most = min((n for words, n in COUNTED.items() if any(word in key for word in words)), default=LARGEST)
    return f"is more than a model can have; write at most {most}" if abs(value) > most else None


# -- building ----------------------------------------------------------------------------------------------


def model_of(config_path: Path) -> Callable[[], nn.Module]:
    """What builds the model of a config, with random weights."""
    read_config(config_path)
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError:
        raise FullshardError("Hugging Face models need transformers: pip install 'fullshard[hf]'") from None
    with _offline():
        config = AutoConfig.from_pretrained(config_path, trust_remote_code=False, local_files_only=True)
    kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel

    def build() -> nn.Module:
        with _offline(), _few_modules(config_path):
            return kind.from_config(config, trust_remote_code=False)

    return build


@contextmanager
def _offline() -> Iterator[None]:
    """Nothing of the hub's is reached: not by transformers, nor by what it calls."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _few_modules(path: Path) -> Iterator[None]:
    """Stop at more modules than a model may have: whatever key of a config multiplies them, they are made one by one."""
    made = 0

    def count(module: nn.Module, name: str, inner: nn.Module | None) -> None:
        nonlocal made
        made += 1
        if made > MOST_MODULES:
            raise FullshardError(f"{path} describes a model of more than {MOST_MODULES:,} modules; write fewer layers")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
