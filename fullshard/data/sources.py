"""Reads documents from files, directories and Hugging Face datasets.

Every source yields pairs of a place, which names the document in errors, and a record of its fields or columns.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError, first_line, nearest
from fullshard.base.reading import is_directory, is_plain_file, parse_json, read_bytes

Record = dict[str, Any]
Located = tuple[str, Record]  # place and record

MOST_DOCUMENT = 2 << 30  # bytes of a text file, which is one document
MOST_LINE = 64 << 20  # characters of a JSONL line
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a surrogate pair in JSON


@dataclass(frozen=True)
class HubDataset:
    """A Hugging Face dataset: a name on the hub, a directory made by `save_to_disk`, or local files.

    `split` is `train` by default; `subset` is what the hub calls a configuration.
    """

    name: str
    subset: str | None = None
    split: str | None = None


DataSource = str | Path | HubDataset


def records(inputs: Iterable[DataSource], wanted: list[str], *, texts: bool) -> Iterator[Located]:
    """The records of all inputs, in order. They have at least the `wanted` fields that exist.

    `texts`: accept plain text files, whose text goes under the first wanted field. Missing files raise at once, before
    anything is read.
    """
    readers = READERS if texts else {s: r for s, r in READERS.items() if r is not _read_text}
    sources = [one for given in inputs for one in _sources(given, readers)]
    return (record for source in sources for record in _read(source, wanted))


def _read(source: Path | HubDataset, wanted: list[str]) -> Iterator[Located]:
    return _read_dataset(source, wanted) if isinstance(source, HubDataset) else READERS[source.suffix](source, wanted)


# -- files ------------------------------------------------------------------------------------------------


FileReader = Callable[[Path, list[str]], Iterator[Located]]


def _sources(given: DataSource, readers: dict[str, FileReader]) -> Iterator[Path | HubDataset]:
    if isinstance(given, HubDataset):
        yield given
        return
    path = Path(given)
    if is_directory(path):
        files = sorted(p for p in _files(path) if p.suffix in readers)
        if not files:
            raise FullshardError(f"{path} has no {', '.join(readers)} files")
        yield from files
    elif not is_plain_file(path):
        raise FullshardError(f"there is no file {path}")
    elif path.suffix not in readers:
        unknown = f"cannot read {path.suffix or 'a file without an ending'}"
        what = "holds no conversations" if path.suffix in READERS else unknown
        raise FullshardError(f"{path}: {what}; give {', '.join(readers)}")
    else:
        yield path


def _files(directory: Path) -> Iterator[Path]:
    """The plain files in a directory and its subdirectories. Raises for a directory that cannot be listed."""

    def refuse(error: OSError) -> None:
        raise FullshardError(f"cannot read the directory {error.filename}: {error.strerror}")

    for parent, _, names in os.walk(directory, onerror=refuse):
        yield from (p for name in names if is_plain_file(p := Path(parent, name)))


def _read_text(path: Path, wanted: list[str]) -> Iterator[Located]:
    data = read_bytes(path, "document", MOST_DOCUMENT)
    try:
        yield str(path), {wanted[0]: io.TextIOWrapper(io.BytesIO(data), "utf-8").read()}
    except UnicodeDecodeError as error:
        raise FullshardError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None


def read_jsonl(path: Path, wanted: list[str]) -> Iterator[Located]:
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE + 1), ""), 1):
                if len(line) > MOST_LINE:
                    raise FullshardError(f"{path}:{number} has more than {MOST_LINE:,} characters; write one record per line")
                if line.strip():
                    yield f"{path}:{number}", _json_record(f"{path}:{number}", line)
    except OSError as error:
        raise FullshardError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FullshardError(f"{path} is not UTF-8 text (after line {number}); convert it first") from None


def _json_record(place: str, line: str) -> Record:
    record = parse_json(line, place)
    if not isinstance(record, dict):
        raise FullshardError(f'{place} is not a JSON object; write one per line, as in {{"text": "…"}}')
    if SURROGATE.search(line):
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise FullshardError(
                f"{place} holds half of a surrogate pair, which is not text; repair or leave out the line"
            ) from None
    return record


def _read_parquet(path: Path, wanted: list[str]) -> Iterator[Located]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise FullshardError(f"{path}: Parquet needs pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path, page_checksum_verification=True)
        names = file.schema_arrow.names
    except Exception as error:
        raise FullshardError(f"{path} is not a Parquet file: {first_line(error)}") from None
    for row, record in enumerate(_rows(path, file, _columns(str(path), names, wanted)), 1):
        if any(record.values()):  # a row without text is not a document
            yield f"{path}, row {row}", record


def _rows(path: Path, file: Any, columns: list[str]) -> Iterator[Record]:
    try:
        for batch in file.iter_batches(columns=columns):
            yield from batch.to_pylist()
    except Exception as error:  # damaged pages, or text that is not UTF-8
        raise FullshardError(f"{path} is damaged: {first_line(error)}") from None


def _columns(place: str, names: list[str], wanted: list[str]) -> list[str]:
    columns = [name for name in wanted if name in names]
    if not columns:
        what = f"no column {wanted[0]!r}" if len(wanted) == 1 else f"none of the columns {', '.join(wanted)}"
        raise FullshardError(f"{place} has {what} (it has {', '.join(names)}){nearest(wanted[0], names)}")
    return columns


READERS: dict[str, FileReader] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".py": _read_text,
    ".jsonl": read_jsonl,
    ".parquet": _read_parquet,
}


# -- Hugging Face datasets ---------------------------------------------------------------------------------

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}


def _read_dataset(given: HubDataset, wanted: list[str]) -> Iterator[Located]:
    try:
        for row, record in enumerate(_open_dataset(given, wanted), 1):
            if any(record.values()):
                yield f"{given.name}, row {row}", record
    except FullshardError:
        raise
    except Exception as error:  # of the library, the network or the file system
        raise FullshardError(f"cannot read the dataset {given.name}: {' '.join(str(error).split())}") from None


def _open_dataset(given: HubDataset, wanted: list[str]) -> Any:
    try:
        import datasets
    except ImportError:
        raise FullshardError(f"the dataset {given.name} needs datasets: pip install 'fullshard[datasets]'") from None
    if hasattr(datasets.config, "HF_DATASETS_TRUST_REMOTE_CODE"):  # before 4.0; later versions run no code of a dataset
        datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    path = Path(given.name)
    saved = any(is_plain_file(path / index) for index in ("state.json", "dataset_dict.json"))
    dataset = _saved_split(given, datasets.load_from_disk(given.name)) if saved else _streamed(given, path, datasets)
    if dataset.column_names is None:  # a streamed dataset may not know them
        return dataset
    return dataset.select_columns(_columns(given.name, dataset.column_names, wanted))


def _saved_split(given: HubDataset, dataset: Any) -> Any:
    """A dataset from `save_to_disk`, or the split of one that was saved with splits."""
    if given.subset is not None:
        raise FullshardError(f"--subset has no effect on {given.name}, a saved dataset; leave it out")
    if not isinstance(dataset, dict):
        if given.split is not None:
            raise FullshardError(f"--split has no effect on {given.name}, which is saved without splits; leave it out")
        return dataset
    split = given.split or "train"
    if split not in dataset:
        raise FullshardError(f"{given.name} has no split {split!r} (it has {', '.join(dataset)}); name one with --split")
    return dataset[split]


def _streamed(given: HubDataset, path: Path, datasets: Any) -> Any:
    """A dataset of the hub or of a local file, read without a copy on disk."""
    split = given.split or "train"
    if not is_plain_file(path):
        return datasets.load_dataset(given.name, given.subset, split=split, streaming=True)
    if path.suffix not in BUILDERS:
        raise FullshardError(f"{path}: cannot read {path.suffix or 'a file without an ending'}; give {', '.join(BUILDERS)}")
    if given.subset is not None:
        raise FullshardError(f"--subset has no effect on {given.name}, a file; leave it out")
    return datasets.load_dataset(BUILDERS[path.suffix], data_files=given.name, split=split, streaming=True)
