"""Tokenizes text into token files, in parallel. The result does not depend on the number of workers."""

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from pathlib import Path

from fullshard.base.errors import FullshardError, nearest
from fullshard.data.chat import RECORD_FIELDS, conversation, wanted_fields
from fullshard.data.sources import DataSource, Located, Record, records
from fullshard.data.templates import open_template
from fullshard.data.token_files import SHARD_TOKENS, TokenFile, TokenWriter
from fullshard.data.tokenizer import Document, MarkedText, Tokenizer, open_tokenizer

GROUP = 64  # documents that a worker takes at a time
AHEAD = 4  # groups that are read ahead for each worker
MOST_WORKERS = 1024
KINDS = ((type(None), "null"), (bool, "true or false"), ((int, float), "a number"), (list, "a list"), (dict, "an object"))


def pack(
    inputs: Iterable[DataSource],
    output: str | Path,
    *,
    tokenizer: str = "bytes",
    end: str | None = None,
    field: str | None = None,
    chat: bool = False,
    template: str | Path | None = None,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> TokenFile:
    """Tokenize every document of `inputs` (.txt, .jsonl, .parquet, directories of them, datasets) into `output`.

    `tokenizer`: `bytes`, a Hugging Face tokenizer.json or a directory with one. `end`: the token that ends each document.
    `field`: the field that holds the text. With `chat` the records are conversations: `template` renders them to text, and
    only the assistant's answers are marked to be predicted. `progress(documents, tokens)` is called as documents are done.
    """
    _refuse_options(chat, template, workers)
    opened = open_tokenizer(tokenizer, end)
    read: ReadRecord = partial(_text, field or "text")
    if chat:
        read = partial(conversation, open_template(tokenizer, template, opened.special), field)
    located = records(inputs, wanted_fields(field) if chat else [field or "text"], texts=not chat)
    documents = tokens = 0
    with TokenWriter(output, opened.vocab, opened.name, shard_tokens=shard_tokens) as writer:
        for encoded in _in_parallel(partial(_encode, opened, read), _groups(located), workers):
            for document in encoded:
                writer.add(document.tokens, document.answers)
                documents, tokens = documents + 1, tokens + document.tokens.size
            progress(documents, tokens)
    return TokenFile(output)


def _refuse_options(chat: bool, template: str | Path | None, workers: int | None) -> None:
    if template is not None and not chat:
        raise FullshardError("--template has no effect without --chat; add --chat, or leave it out")
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise FullshardError(f"--workers is a number of processes from 1 to {MOST_WORKERS}, not {workers}")


ReadRecord = Callable[[str, Record], MarkedText]
Encode = Callable[[list[Located]], list[Document]]


def _text(field: str, place: str, record: Record) -> MarkedText:
    """The text of a record that is not a conversation."""
    if not isinstance(record.get(field), str):
        keys = list(record)
        if field in record:
            kind = next((word for kinds, word in KINDS if isinstance(record[field], kinds)), type(record[field]).__name__)
            raise FullshardError(f"{place}: {field!r} is {kind}, not text; name the field that holds the text with --field")
        hint = "; for conversations add --chat" if set(keys) & set(RECORD_FIELDS) else nearest(field, keys)
        raise FullshardError(f"{place} has no text in {field!r} (it has {', '.join(keys) or 'no keys'}){hint}")
    return MarkedText(record[field])


def _encode(tokenizer: Tokenizer, read: ReadRecord, located: list[Located]) -> list[Document]:
    return tokenizer.encode([read(place, record) for place, record in located])


def _groups(located: Iterator[Located]) -> Iterator[list[Located]]:
    while group := list(islice(located, GROUP)):
        yield group


def _in_parallel(encode: Encode, groups: Iterator[list[Located]], workers: int | None) -> Iterator[list[Document]]:
    """The encoded groups, in their order."""
    workers = _checked_workers(workers)
    if workers == 1:
        yield from map(encode, groups)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        try:
            yield from _in_order(pool, encode, groups, AHEAD * workers)
        except BrokenProcessPool:
            raise FullshardError(
                "a worker of pack ended early: it was killed, most likely for lack of memory, and fewer workers need less; or "
                'your script calls pack outside of `if __name__ == "__main__":`, where workers run it again, so move it inside'
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, nobody waits for the groups that were read ahead


def _checked_workers(wanted: int | None) -> int:
    """The number of processes. It is 1 for a script from standard input, which workers could not import."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if wanted == 1 or file is None or getattr(main, "__spec__", None) is not None or os.path.exists(file):
        return wanted if wanted is not None else os.cpu_count() or 1
    if wanted is None:
        return 1
    raise FullshardError(
        f"workers = {wanted}: workers import the script that calls pack, and there is no file {file}; write workers=1, or put "
        "the script in a file"
    )


def _in_order(pool: ProcessPoolExecutor, encode: Encode, groups: Iterator[list[Located]], ahead: int) -> Iterator[list[Document]]:
    """As `pool.map`, which would read all groups at once."""
    waiting: deque[Future[list[Document]]] = deque()
    for group in groups:
        waiting.append(pool.submit(encode, group))
        if len(waiting) == ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
