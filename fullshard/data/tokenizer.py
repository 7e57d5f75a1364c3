"""From text to tokens: bytes, or a Hugging Face tokenizer.json; and whether two agree."""

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

from fullshard.data.tokens import TokenFile
from fullshard.errors import FullshardError, first_line
from fullshard.reading import is_directory, is_plain_file, parse_json, read_bytes, read_text

BYTES_END = 0  # ends a document of bytes: no text holds it
MOST_BYTES = 256 << 20  # of a tokenizer.json: those of 256,000 tokens have 35 MB
COMMON_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")

Spans = list[tuple[int, int]]


class Marked(NamedTuple):
    """A text, and in a conversation the characters of its answers."""

    text: str
    answers: Spans | None = None


class Document(NamedTuple):
    """Tokens, and in a conversation whether each belongs to an answer."""

    tokens: NDArray[Any]
    answers: NDArray[np.bool_] | None


class Tokenizer(Protocol):
    """What packing needs of one; it is sent to the workers."""

    @property
    def name(self) -> str:
        """What the index remembers: it does not depend on where a file lies."""

    @property
    def vocab(self) -> int: ...

    @property
    def special(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and so on, for chat templates."""

    @property
    def end_id(self) -> int:
        """The token that ends a document."""

    def encode(self, texts: Sequence[Marked]) -> list[Document]: ...

    def prompt(self, text: str) -> list[int]:
        """The tokens of a beginning: no end after it."""

    def decode(self, tokens: Sequence[int]) -> str: ...


def open_tokenizer(given: str, end: str | None) -> Tokenizer:
    """`given`: `bytes`, a tokenizer.json, or a directory with one; `end`: the token that ends a document."""
    if given != "bytes":
        return FileTokenizer(_tokenizer_file(given), end)
    if end is not None:
        raise FullshardError("--end has no effect with --tokenizer bytes: a document ends with the byte 0; leave it out")
    return Bytes()


def _tokenizer_file(given: str) -> Path:
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
class Bytes:
    """A token is a byte of UTF-8, and the byte 0 ends a document."""

    name: str = "bytes"
    vocab: int = 256
    special: dict[str, str] = field(default_factory=dict)

    end_id: int = BYTES_END

    def encode(self, texts: Sequence[Marked]) -> list[Document]:
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
    """Then the end of the document is part of it: the model has to learn to stop."""
    return bool(answers) and answers[-1][1] == len(text)


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer.json; what lies beside it says which token ends a text."""

    path: Path
    end: str | None = None

    def __post_init__(self) -> None:
        self.end_id  # noqa: B018 - refuses now what would fail in a worker

    @cached_property
    def name(self) -> str:
        return file_name(self.path)

    @property
    def vocab(self) -> int:
        known = _load(self.path).get_vocab(with_added_tokens=True).values()
        return max(known, default=-1) + 1  # there may be gaps

    @cached_property
    def special(self) -> dict[str, str]:
        return {"eos_token": self.end_text} | special_tokens(self.path.parent)

    @cached_property
    def end_text(self) -> str:
        named = special_tokens(self.path.parent).get("eos_token")
        candidates = [self.end] if self.end else [*([named] if named else []), *COMMON_ENDS]
        for token in candidates:
            if _load(self.path).token_to_id(token) is not None:
                return token
        what = f"has no token {self.end!r}" if self.end else f"has none of {', '.join(candidates)}"
        raise FullshardError(f"{self.path} {what}; name the token that ends a document with --end")

    @cached_property
    def end_id(self) -> int:
        return _load(self.path).token_to_id(self.end_text)

    def encode(self, texts: Sequence[Marked]) -> list[Document]:
        loaded = _load(self.path)
        marked = any(answers is not None for _, answers in texts)
        encode = loaded.encode_batch if marked else loaded.encode_batch_fast  # the fast one knows no offsets
        with _told(f"{self.path} cannot tokenise"):
            encoded = encode([text for text, _ in texts], add_special_tokens=False)
        return [self._document(e, *text) for e, text in zip(encoded, texts, strict=True)]

    def prompt(self, text: str) -> list[int]:
        return _load(self.path).encode(text, add_special_tokens=True).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return _load(self.path).decode(list(tokens), skip_special_tokens=True)

    def _document(self, encoded: Any, text: str, answers: Spans | None) -> Document:
        if answers is None:
            return Document(np.array([*encoded.ids, self.end_id]), None)
        starts = np.array([start for start, _ in encoded.offsets], np.int64)
        edges = [edge for span in answers for edge in span]
        within = np.searchsorted(edges, starts, side="right") % 2 == 1
        if text.rstrip().endswith(self.end_text):  # the template has written it
            return Document(np.array(encoded.ids), within)
        return Document(np.array([*encoded.ids, self.end_id]), np.append(within, _ends_in_answer(text, answers)))


@contextmanager
def _told(sentence: str) -> Iterator[None]:
    """What the tokenizers library raises, in a sentence. A panic of Rust's is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise FullshardError(f"{sentence}: {first_line(error)}") from None


@lru_cache
def _load(path: Path) -> Any:
    """A worker loads its tokenizer once."""
    try:
        from tokenizers import Tokenizer as Fast
    except ImportError:
        raise FullshardError("a tokenizer file needs tokenizers: pip install 'fullshard[data]'") from None
    text = read_bytes(path, "tokenizer", MOST_BYTES)
    with _told(f"{path} is not a tokenizer.json"):
        loaded = Fast.from_buffer(text)
    loaded.no_truncation()  # some files carry the length that their model was served with
    loaded.no_padding()
    return loaded


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing where there is none."""
    path = directory / "tokenizer_config.json"
    if not is_plain_file(path):
        return {}
    found = parse_json(read_text(path, "tokenizer config"), str(path))
    return found if isinstance(found, dict) else {}


def special_tokens(directory: Path) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names, as text; some are written as objects."""
    named = {key: value for key, value in tokenizer_config(directory).items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


# -- whether two agree ---------------------------------------------------------------------------------------


def file_name(path: Path) -> str:
    return f"sha256:{hashlib.sha256(read_bytes(path, 'tokenizer', MOST_BYTES)).hexdigest()}"


def refuse_other_tokenizer(tokens: TokenFile, model_dir: str | Path) -> None:
    """Raise where the model comes with a tokenizer.json that is not the one the tokens were made with.

    A name that somebody's own writer chose can be compared with nothing, and is believed.
    """
    path = Path(model_dir) / "tokenizer.json"
    known = tokens.tokenizer == "bytes" or tokens.tokenizer.startswith("sha256:")
    if known and is_plain_file(path) and (name := file_name(path)) != tokens.tokenizer:
        raise FullshardError(
            f"{tokens.path} was packed with another tokenizer ({_short(tokens.tokenizer)}) than the model's {path} "
            f"({_short(name)}); pack the text again with --tokenizer {model_dir}"
        )


def refuse_different(a: TokenFile, b: TokenFile) -> None:
    """Raise where two token files were made with different tokenizers."""
    if (a.tokenizer, a.vocab) != (b.tokenizer, b.vocab):
        raise FullshardError(
            f"{a.path} and {b.path} were packed with different tokenizers ({_short(a.tokenizer)} of {a.vocab} tokens, "
            f"{_short(b.tokenizer)} of {b.vocab}); pack both with the same --tokenizer"
        )


def _short(name: str) -> str:
    return name[: len("sha256:") + 8] if name.startswith("sha256:") else name
