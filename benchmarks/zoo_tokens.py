"""Numbers of special tokens that lie within a small vocabulary, in a configuration and those inside."""

import re
from typing import Any

FIRST, COUNT = 100, 20  # of the numbers given: above those that inputs are drawn from
TOKEN = re.compile(r"token_(id|index)$")
PLACE = re.compile("image|audio|video")  # whose token a model needs


def shrink(config: Any, vocabulary: int) -> None:
    """Give each token that is outside the vocabulary, or missing, a number inside. A name has one number everywhere."""
    numbers: dict[str, int] = {}
    for inside in _all(config):
        ids = {k: v for k, v in vars(inside).items() if TOKEN.search(k)}
        large = [k for k, v in ids.items() if _largest(v) >= vocabulary]
        missing = [k for k, v in ids.items() if v is None and PLACE.search(k)]
        for name in sorted([*large, *missing]):
            setattr(inside, name, numbers.setdefault(name, FIRST + len(numbers) % COUNT))
        _pad(inside)


def _all(config: Any) -> list[Any]:
    """The configuration and those inside, outer ones first."""
    inner = [v for v in vars(config).values() if hasattr(v, "model_type")]
    return [config, *(c for v in inner for c in _all(v))]


def _largest(value: Any) -> int:
    values = value if isinstance(value, list | tuple) else [value]
    return max((v for v in values if isinstance(v, int)), default=-1)


def _pad(config: Any) -> None:
    """Tokens that classifiers and decoders need."""
    if getattr(config, "vocab_size", None) and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
