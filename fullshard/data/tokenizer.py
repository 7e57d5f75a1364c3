"""Tokenizers: bytes, or a Hugging Face tokenizer.json. Also checks that data and model use the same one."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fullshard.base.errors import FullshardError, first_line
from fullshard.base.reading import is_directory, is_plain_file, parse_json, read_bytes, read_text
from fullshard.data.token_files import TokenFile

BYTES_END = 0  # the token that ends a document; text does not contain it
MOST_BYTES = 256 << 20  # of a tokenizer.json: one of 256,000 tokens has 35 MB
COMMON_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")

Spans = list[tuple[int, int]]  # start and end, in characters


class MarkedText(NamedTuple):
    """A text; of a conversation also the spans of its answers."""

    text: str
    answers: Spans | None = None


class Document(NamedTuple):
    """A document's tokens; of a conversation also whether each belongs to an answer."""

    tokens: NDArray[Any]
    answers: NDArray[np.bool_] | None


class Tokenizer(Protocol):
    """What packing and sampling need of a tokenizer. It can be pickled, to be sent to worker processes."""

    @property
    def name(self) -> str:
        """The identity of the tokenizer, which the index of token files stores. It does not depend on paths."""

    @property
    def vocab(self) -> int: ...

    @property
    def special(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and so on, for chat templates."""

    @property
    def end_id(self) -> int:
        """The token that ends a document."""

    def encode(self, texts: Sequence[MarkedText]) -> list[Document]: ...

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text to be continued, without an end token."""

    def decode(self, tokens: Sequence[int]) -> str: ...


def open_tokenizer(given: str, end: str | None) -> Tokenizer:
    """Open a tokenizer. `given`: `bytes`, a tokenizer.json, or a directory with one; `end`: the token that ends a document."""
    if given != "bytes":
        return FileTokenizer(tokenizer_file(given), end)
    if end is not None:
        raise FullshardError("--end has no effect with --tokenizer bytes: a document ends with the byte 0; leave it out")
    return ByteTokenizer()


def tokenizer_file(given: str) -> Path:
    path = Path(given)
    if is_directory(path):
        if not is_plain_file(path / "tokenizer.json"):
            raise FullshardError(
                f"{path} has no tokenizer.json; a tokenizer of another kind makes one with transformers' save_pretrained"
            )
        return path / "tokenizer.json"
    if not is_plain_file(path):
        raise FullshardError(f"there is no tokenizer file {path}; write bytes, or the path of a tokenizer.json")
    return path


@dataclass(frozen=True)
class ByteTokenizer:
    """Every byte of UTF-8 text is a token, and the byte 0 ends a document."""

    name: str = "bytes"
    vocab: int = 256
    special: dict[str, str] = field(default_factory=dict)

    end_id: int = BYTES_END

    def encode(self, texts: Sequence[MarkedText]) -> list[Document]:
        return [Document(_bytes(text), _marked_bytes(text, answers)) for text, answers in texts]

    def prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t != BYTES_END and t < 256).decode(errors="replace")


def _bytes(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode().replace(b"\0", b" ") + bytes([BYTES_END]), np.uint8)


def _marked_bytes(text: str, answers: Spans | None) -> NDArray[np.bool_] | None:
    if answers is None:
        return None
    edges = [0, *[edge for span in answers for edge in span], len(text)]
    lengths = [len(text[a:b].encode()) for a, b in pairwise(edges)]
    within = np.arange(len(lengths)) % 2 == 1
    return np.append(np.repeat(within, lengths), _ends_in_answer(text, answers))


def _ends_in_answer(text: str, answers: Spans) -> bool:
    """Whether the last answer reaches the end of the text. The end token then belongs to it: the model must learn to stop."""
    return bool(answers) and answers[-1][1] == len(text)


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer.json. The tokenizer_config.json beside it names the token that ends a document, unless `end` does."""

    path: Path
    end: str | None = None

    def __post_init__(self) -> None:
        self.end_id  # noqa: B018 - raise here rather than in a worker

    @cached_property
    def name(self) -> str:
        return tokenizer_hash(self.path)

    @property
    def vocab(self) -> int:
        known = load_tokenizer(self.path).get_vocab(with_added_tokens=True).values()
        return max(known, default=-1) + 1  # ids may have gaps

    @cached_property
    def special(self) -> dict[str, str]:
        return {"eos_token": self.end_text} | special_tokens(self.path.parent)

    @cached_property
    def end_text(self) -> str:
        named = special_tokens(self.path.parent).get("eos_token")
        candidates = [self.end] if self.end else [*([named] if named else []), *COMMON_ENDS]
        for token in candidates:
            if load_tokenizer(self.path).token_to_id(token) is not None:
                return token
        what = f"has no token {self.end!r}" if self.end else f"has none of {', '.join(candidates)}"
        raise FullshardError(f"{self.path} {what}; name the token that ends a document with --end")

    @cached_property
    def end_id(self) -> int:
        return load_tokenizer(self.path).token_to_id(self.end_text)

    def encode(self, texts: Sequence[MarkedText]) -> list[Document]:
        loaded = load_tokenizer(self.path)
        marked = any(answers is not None for _, answers in texts)
        encode = loaded.encode_batch if marked else loaded.encode_batch_fast  # the fast one gives no offsets
        with refusing_library_errors(f"{self.path} cannot tokenise"):
            encoded = encode([text for text, _ in texts], add_special_tokens=False)
        return [self._document(e, *text) for e, text in zip(encoded, texts, strict=True)]

    def prompt(self, text: str) -> list[int]:
        return load_tokenizer(self.path).encode(text, add_special_tokens=True).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return load_tokenizer(self.path).decode(list(tokens), skip_special_tokens=True)

    def _document(self, encoded: Any, text: str, answers: Spans | None) -> Document:
        if answers is None:
            return Document(np.array([*encoded.ids, self.end_id]), None)
        starts = np.array([start for start, _ in encoded.offsets], np.int64)
        edges = [edge for span in answers for edge in span]
        within = np.searchsorted(edges, starts, side="right") % 2 == 1
        if text.rstrip().endswith(self.end_text):  # the chat template has written the end token
            return Document(np.array(encoded.ids), within)
        return Document(np.array([*encoded.ids, self.end_id]), np.append(within, _ends_in_answer(text, answers)))


@contextmanager
def refusing_library_errors(sentence: str) -> Iterator[None]:
    """Turn errors of the tokenizers library into a FullshardError. A panic in Rust is a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise FullshardError(f"{sentence}: {first_line(error)}") from None


@lru_cache
def load_tokenizer(path: Path) -> Any:
    """The loaded tokenizer. Cached: a worker loads it once."""
    try:
        from tokenizers import Tokenizer as Fast
    except ImportError:
        raise FullshardError("a tokenizer file needs tokenizers: pip install 'fullshard[data]'") from None
    text = read_bytes(path, "tokenizer", MOST_BYTES)
    with refusing_library_errors(f"{path} is not a tokenizer.json"):
        loaded = Fast.from_buffer(text)
    loaded.no_truncation()  # some files set a maximum length
    loaded.no_padding()
    return loaded


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """The contents of tokenizer_config.json; empty if there is none."""
    path = directory / "tokenizer_config.json"
    if not is_plain_file(path):
        return {}
    config = parse_json(read_text(path, "tokenizer config"), str(path))
    return config if isinstance(config, dict) else {}


def special_tokens(directory: Path) -> dict[str, str]:
    """The special tokens in tokenizer_config.json, as text. Some files write them as objects."""
    named = {key: value for key, value in tokenizer_config(directory).items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


# -- comparing tokenizers ------------------------------------------------------------------------------------


def tokenizer_hash(path: Path) -> str:
    """The name of a file tokenizer: the hash of its tokenizer.json."""
    return f"sha256:{hashlib.sha256(read_bytes(path, 'tokenizer', MOST_BYTES)).hexdigest()}"


def refuse_other_tokenizer(tokens: TokenFile, model_dir: str | Path) -> None:
    """Raise if the model's directory has a tokenizer.json other than the one that the tokens were packed with.

    Tokens whose tokenizer has any other name, from a `TokenWriter` of the user's, are not checked.
    """
    path = Path(model_dir) / "tokenizer.json"
    known = tokens.tokenizer == "bytes" or tokens.tokenizer.startswith("sha256:")
    if known and is_plain_file(path) and (name := tokenizer_hash(path)) != tokens.tokenizer:
        raise FullshardError(
            f"{tokens.path} was packed with another tokenizer ({_short(tokens.tokenizer)}) than the model's {path} "
            f"({_short(name)}); pack the text again with --tokenizer {model_dir}"
        )


def refuse_different(a: TokenFile, b: TokenFile) -> None:
    """Raise if two token files were packed with different tokenizers."""
    if (a.tokenizer, a.vocab) != (b.tokenizer, b.vocab):
        raise FullshardError(
            f"{a.path} and {b.path} were packed with different tokenizers ({_short(a.tokenizer)} of {a.vocab} tokens, "
            f"{_short(b.tokenizer)} of {b.vocab}); pack both with the same --tokenizer"
        )


def _short(name: str) -> str:
    return name[: len("sha256:") + 8] if name.startswith("sha256:") else name
