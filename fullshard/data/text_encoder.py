"""Turns a text into the token ids that a model takes, special tokens included, cut to a length."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fullshard.base.errors import FullshardError
from fullshard.data.tokenizer import load_tokenizer, refusing_library_errors, special_tokens, tokenizer_file, tokenizer_hash

MASKS, PADS = ("[MASK]", "<mask>"), ("[PAD]", "<pad>")
BYTE_PAD, BYTE_MASK = 0, 255  # neither byte occurs in UTF-8 text


class EncodedText(NamedTuple):
    """The ids of a text, and which of them the tokenizer added."""

    ids: NDArray[np.int64]
    special: NDArray[np.bool_]


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer.json, or bytes where `path` is None."""

    path: Path | None

    @property
    def identity(self) -> str:
        return tokenizer_hash(self.path) if self.path else "bytes"

    @cached_property
    def vocab(self) -> int:
        if self.path is None:
            return 256
        return max(load_tokenizer(self.path).get_vocab(with_added_tokens=True).values(), default=-1) + 1  # ids may have gaps

    @cached_property
    def pad_id(self) -> int:
        """The id of padding. 0 where the tokenizer has none: padding counts nowhere."""
        return BYTE_PAD if self.path is None else self._named("pad_token", PADS) or 0

    @cached_property
    def mask_id(self) -> int:
        number = BYTE_MASK if self.path is None else self._named("mask_token", MASKS)
        if number is None:
            raise FullshardError(f"{self.path} has no mask token ({', '.join(MASKS)}); use the tokenizer of a masked model")
        return number

    def _named(self, name: str, usual: tuple[str, ...]) -> int | None:
        assert self.path is not None
        given = special_tokens(self.path.parent).get(name)
        ids = [load_tokenizer(self.path).token_to_id(token) for token in ([given] if given else []) + list(usual)]
        return next((i for i in ids if i is not None), None)

    def __call__(self, text: str, at_most: int) -> EncodedText:
        """The ids of a text. A text that is too long loses tokens before the special ones at its end."""
        if self.path is None:
            ids = np.frombuffer(text.encode().replace(b"\0", b" "), np.uint8).astype(np.int64)[:at_most]
            return EncodedText(ids, np.zeros(ids.size, np.bool_))
        with refusing_library_errors(f"{self.path} cannot tokenise"):
            encoded = load_tokenizer(self.path).encode(text, add_special_tokens=True)
        ids, special = np.array(encoded.ids, np.int64), np.array(encoded.special_tokens_mask, np.bool_)
        if ids.size <= at_most:
            return EncodedText(ids, special)
        ends = int(np.argmin(special[::-1])) if not special.all() else 0  # special tokens at the end
        keep = np.r_[: at_most - ends, ids.size - ends : ids.size]
        return EncodedText(ids[keep], special[keep])


def open_encoder(given: str) -> TextEncoder:
    """`given`: `bytes`, a tokenizer.json, or a directory with one."""
    if given == "bytes":
        return TextEncoder(None)
    encoder = TextEncoder(tokenizer_file(given))
    encoder.vocab  # noqa: B018 - a damaged file raises here rather than in a worker
    return encoder
