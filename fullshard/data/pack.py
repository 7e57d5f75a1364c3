"""From text to token files, in parallel; the result does not depend on how many workers made it."""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from fullshard.data.tokens import SHARD_TOKENS, TokenFile, TokenWriter
from fullshard.errors import FullshardError, nearest

BYTES_END = 0  # ends a document of bytes: no text holds it
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")
GROUP = 64  # documents a worker takes at a time


def pack(
    inputs: Iterable[str | Path],
    output: str | Path,
    *,
    tokenizer: str = "bytes",
    end: str | None = None,
    field: str = "text",
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> TokenFile:
    """Tokenise every document of `inputs` (.txt, .jsonl, .parquet, or directories of them) into `output`.

    `tokenizer` is `bytes` or a Hugging Face tokenizer.json; `end` the token that closes each document.
    """
    files = list(_files(inputs))
    encode, vocab = _encoder(tokenizer, end)
    documents = tokens = 0
    with TokenWriter(output, vocab, tokenizer_name(tokenizer), shard_tokens=shard_tokens) as writer:
        groups = _groups(text for file in files for text in _documents(file, field))
        for encoded in _in_parallel(encode, groups, workers):
            for document in encoded:
                writer.add(document)
                documents, tokens = documents + 1, tokens + len(document)
            progress(documents, tokens)
    return TokenFile(output)


def tokenizer_name(tokenizer: str) -> str:
    """What the index remembers of the tokenizer: a name that does not depend on where its file lies."""
    if tokenizer == "bytes":
        return "bytes"
    import hashlib

    return f"sha256:{hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()}"


# -- reading ----------------------------------------------------------------------------------------------


def _files(inputs: Iterable[str | Path]) -> Iterator[Path]:
    for given in map(Path, inputs):
        if given.is_dir():
            found = sorted(p for p in given.rglob("*") if p.suffix in READERS)
            if not found:
                raise FullshardError(f"{given} has no {', '.join(READERS)} files")
            yield from found
        elif not given.is_file():
            raise FullshardError(f"there is no file {given}")
        else:
            yield given


def _documents(path: Path, field: str) -> Iterator[str]:
    if path.suffix not in READERS:
        raise FullshardError(f"{path}: cannot read {path.suffix or 'a file without an ending'}; give {', '.join(READERS)}")
    return READERS[path.suffix](path, field)


def _read_text(path: Path, field: str) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FullshardError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _field(path, number, line, field)


def _field(path: Path, number: int, line: str, field: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise FullshardError(f"{path}:{number} is not JSON: {error.msg}") from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        keys = list(record) if isinstance(record, dict) else []
        raise FullshardError(
            f"{path}:{number} has no text in {field!r} (it has {', '.join(keys) or 'no keys'}){nearest(field, keys)}"
        )
    return record[field]


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise FullshardError(f"{path}: Parquet needs pyarrow: pip install pyarrow") from None
    file = parquet.ParquetFile(path)
    if field not in file.schema_arrow.names:
        raise FullshardError(f"{path} has no column {field!r} (it has {', '.join(file.schema_arrow.names)})")
    for batch in file.iter_batches(columns=[field]):
        yield from (text for text in batch.column(0).to_pylist() if text)


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".py": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


# -- encoding -----------------------------------------------------------------------------------------------


Encoder = Callable[[list[str]], list[list[int]]]


def _encoder(tokenizer: str, end: str | None) -> tuple[Encoder, int]:
    if tokenizer == "bytes":
        if end is not None:
            raise FullshardError("--end has no effect with --tokenizer bytes: a document ends with the byte 0; leave it out")
        return _encode_bytes, 256
    loaded = _load_tokenizer(tokenizer)
    found = [t for t in ([end] if end else ENDS) if loaded.token_to_id(t) is not None]
    if not found:
        what = f"has no token {end!r}" if end else f"has none of {', '.join(ENDS)}"
        raise FullshardError(f"{tokenizer} {what}; name the token that ends a document with --end")
    return partial(_encode_tokens, tokenizer, loaded.token_to_id(found[0])), loaded.get_vocab_size(with_added_tokens=True)


def _encode_bytes(texts: list[str]) -> list[list[int]]:
    return [[*text.encode().replace(b"\0", b" "), BYTES_END] for text in texts]


_loaded: dict[str, object] = {}  # a worker loads its tokenizer once


def _encode_tokens(tokenizer: str, end: int, texts: list[str]) -> list[list[int]]:
    if tokenizer not in _loaded:
        _loaded[tokenizer] = _load_tokenizer(tokenizer)
    encoded = _loaded[tokenizer].encode_batch_fast(texts, add_special_tokens=False)  # type: ignore[attr-defined]
    return [[*e.ids, end] for e in encoded]


def _load_tokenizer(path: str):  # type: ignore[no-untyped-def]
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise FullshardError("a tokenizer file needs tokenizers: pip install 'fullshard[hf]'") from None
    if not Path(path).is_file():
        raise FullshardError(f"there is no tokenizer file {path}; write bytes, or the path of a tokenizer.json")
    try:
        return Tokenizer.from_file(path)
    except Exception as error:
        raise FullshardError(f"{path} is not a tokenizer.json: {str(error).splitlines()[0]}") from None


def _groups(texts: Iterator[str]) -> Iterator[list[str]]:
    while group := list(islice(texts, GROUP)):
        yield group


def _in_parallel(encode: Encoder, groups: Iterator[list[str]], workers: int | None) -> Iterator[list[list[int]]]:
    """Groups in their order, whoever encodes them."""
    workers = workers or os.cpu_count() or 1
    if workers == 1:
        yield from map(encode, groups)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(encode, groups)
