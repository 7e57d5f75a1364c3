"""Where documents come from: files, directories of them, and Hugging Face datasets.

Every source yields a place, to name in errors, and a record: the fields or columns found there.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.errors import FullshardError, nearest

Record = dict[str, Any]
Located = tuple[str, Record]

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half a character, written in JSON


@dataclass(frozen=True)
class HubDataset:
    """A Hugging Face dataset: a name on the hub, a directory made by `save_to_disk`, or local files.

    `split` is `train` unless given; `subset` is what the hub calls a configuration.
    """

    name: str
    subset: str | None = None
    split: str | None = None


Source = str | Path | HubDataset


def records(inputs: Iterable[Source], wanted: list[str], *, texts: bool) -> Iterator[Located]:
    """The records of all inputs in their order, with the `wanted` fields at least.

    `texts`: plain text files are documents too, their text under the first wanted name. What is missing is
    refused now, before anything is read.
    """
    readers = READERS if texts else {s: r for s, r in READERS.items() if r is not _read_text}
    sources = [found for given in inputs for found in _sources(given, readers)]
    return (record for source in sources for record in _read(source, wanted))


def _read(source: Path | HubDataset, wanted: list[str]) -> Iterator[Located]:
    return _read_dataset(source, wanted) if isinstance(source, HubDataset) else READERS[source.suffix](source, wanted)


# -- files ------------------------------------------------------------------------------------------------


Reader = Callable[[Path, list[str]], Iterator[Located]]


def _sources(given: Source, readers: dict[str, Reader]) -> Iterator[Path | HubDataset]:
    if isinstance(given, HubDataset):
        yield given
        return
    path = Path(given)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in readers)
        if not found:
            raise FullshardError(f"{path} has no {', '.join(readers)} files")
        yield from found
    elif not path.is_file():
        raise FullshardError(f"there is no file {path}")
    elif path.suffix not in readers:
        what = "holds no conversations" if path.suffix in READERS else f"cannot read {path.suffix or 'a file without an ending'}"
        raise FullshardError(f"{path}: {what}; give {', '.join(readers)}")
    else:
        yield path


def _read_text(path: Path, wanted: list[str]) -> Iterator[Located]:
    try:
        yield str(path), {wanted[0]: path.read_text(encoding="utf-8")}
    except UnicodeDecodeError as error:
        raise FullshardError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None


def _read_jsonl(path: Path, wanted: list[str]) -> Iterator[Located]:
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", _json_record(f"{path}:{number}", line)
    except UnicodeDecodeError:
        raise FullshardError(f"{path} is not UTF-8 text (after line {number}); convert it first") from None


def _json_record(place: str, line: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise FullshardError(f"{place} is not JSON: {error.msg}") from None
    if not isinstance(record, dict):
        raise FullshardError(f'{place} is not a JSON object; write one a line, as in {{"text": "…"}}')
    if SURROGATE.search(line):
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise FullshardError(
                f"{place} holds half of a surrogate pair, which is no text; repair or leave out the line"
            ) from None
    return record


def _read_parquet(path: Path, wanted: list[str]) -> Iterator[Located]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise FullshardError(f"{path}: Parquet needs pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise FullshardError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from None
    columns = _columns(str(path), file.schema_arrow.names, wanted)
    row = 0
    for batch in file.iter_batches(columns=columns):
        for record in batch.to_pylist():
            row += 1
            if any(record.values()):  # a row without a text is no document
                yield f"{path}, row {row}", record


def _columns(place: str, names: list[str], wanted: list[str]) -> list[str]:
    found = [name for name in wanted if name in names]
    if not found:
        what = f"no column {wanted[0]!r}" if len(wanted) == 1 else f"none of the columns {', '.join(wanted)}"
        raise FullshardError(f"{place} has {what} (it has {', '.join(names)}){nearest(wanted[0], names)}")
    return found


READERS: dict[str, Reader] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".py": _read_text,
    ".jsonl": _read_jsonl,
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
    except Exception as error:  # its own, the network's, the file system's: all say what they miss
        raise FullshardError(f"cannot read the dataset {given.name}: {' '.join(str(error).split())}") from None


def _open_dataset(given: HubDataset, wanted: list[str]) -> Any:
    try:
        import datasets
    except ImportError:
        raise FullshardError(f"the dataset {given.name} needs datasets: pip install 'fullshard[datasets]'") from None
    path = Path(given.name)
    saved = any((path / index).is_file() for index in ("state.json", "dataset_dict.json"))
    found = _saved_split(given, datasets.load_from_disk(given.name)) if saved else _stream(given, path, datasets)
    if found.column_names is None:  # a stream may not know them
        return found
    return found.select_columns(_columns(given.name, found.column_names, wanted))


def _saved_split(given: HubDataset, found: Any) -> Any:
    """A saved dataset, or the split of a saved dictionary of them."""
    if given.subset is not None:
        raise FullshardError(f"--subset has no effect on {given.name}, a saved dataset; leave it out")
    if not isinstance(found, dict):
        if given.split is not None:
            raise FullshardError(f"--split has no effect on {given.name}, which is saved without splits; leave it out")
        return found
    split = given.split or "train"
    if split not in found:
        raise FullshardError(f"{given.name} has no split {split!r} (it has {', '.join(found)}); name one with --split")
    return found[split]


def _stream(given: HubDataset, path: Path, datasets: Any) -> Any:
    """Streamed: nothing is copied to disk before it is packed."""
    split = given.split or "train"
    if not path.is_file():
        return datasets.load_dataset(given.name, given.subset, split=split, streaming=True)
    if path.suffix not in BUILDERS:
        raise FullshardError(f"{path}: cannot read {path.suffix or 'a file without an ending'}; give {', '.join(BUILDERS)}")
    if given.subset is not None:
        raise FullshardError(f"--subset has no effect on {given.name}, a file; leave it out")
    return datasets.load_dataset(BUILDERS[path.suffix], data_files=given.name, split=split, streaming=True)
