"""Tables of samples: a Parquet, JSONL or CSV file, or a directory that `datasets` saved with `save_to_disk`.

A file is read into memory. A saved data set is mapped, so it may be larger than memory.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError, first_line, nearest
from fullshard.base.reading import hash_ends, is_directory, is_plain_file
from fullshard.data.sources import Record, read_jsonl

ENDINGS = (".parquet", ".jsonl", ".csv")
MORE = "pip install 'fullshard[datasets]'"


@dataclass(frozen=True, eq=False)
class Columns:
    """Rows of named columns. `rows`: a pyarrow Table or a saved data set."""

    path: str
    rows: Any

    @property
    def names(self) -> list[str]:
        return list(self.rows.column_names)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Record:
        if hasattr(self.rows, "features"):  # a saved data set
            return self.rows[i]
        return {name: self.rows.column(name)[i].as_py() for name in self.rows.column_names}

    def place(self, i: int) -> str:
        """Names a row in errors."""
        return f"{self.path}, row {i + 1}"

    def pick(self, names: list[str]) -> "Columns":
        """Only these columns. Raises for one that is not there."""
        for name in names:
            if name not in self.names:
                raise FullshardError(
                    f"{self.path} has no column {name!r} (it has {', '.join(self.names)}){nearest(name, self.names)}"
                )
        return Columns(self.path, (getattr(self.rows, "select_columns", None) or self.rows.select)(names))

    def values(self, name: str) -> list[Any]:
        """A whole column."""
        return list(self.rows[name]) if hasattr(self.rows, "features") else self.rows.column(name).to_pylist()

    def class_names(self, name: str) -> list[str] | None:
        """The classes that a label column names; None if its labels are numbers already."""
        feature = self.rows.features.get(name) if hasattr(self.rows, "features") else None
        if names := getattr(feature, "names", None):
            return list(names)
        values = set(self.values(name))
        return sorted(values) if values and all(isinstance(value, str) for value in values) else None

    @cached_property
    def identity(self) -> str:
        """A short digest of the rows: sizes and both ends of their files. Reading all bytes would take too long."""
        digest = hashlib.sha256(str(len(self)).encode())
        for path in _data_files(Path(self.path)):
            hash_ends(digest, path)
        return digest.hexdigest()[:16]


def _data_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.arrow")) if is_directory(path) else [path]


def is_table(path: str) -> bool:
    """True for a file of columns and for a directory that `datasets` saved."""
    saved = any(is_plain_file(Path(path) / index) for index in ("state.json", "dataset_dict.json"))
    return saved or (is_plain_file(path) and Path(path).suffix in ENDINGS)


def open_columns(path: str) -> Columns:
    """Open a table of samples."""
    columns = Columns(path, _saved(path) if is_directory(path) else _file_rows(Path(path)))
    if not len(columns):
        raise FullshardError(f"{path} has no rows; give data with at least one")
    return columns


def _saved(path: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise FullshardError(f"{path} was saved by datasets, which is not installed: {MORE}") from None
    try:
        dataset = datasets.load_from_disk(path)
    except Exception as error:
        raise FullshardError(f"cannot read the data set {path}: {first_line(error)}") from None
    if isinstance(dataset, dict):
        raise FullshardError(f"{path} holds the splits {', '.join(dataset)}; name one, as in '{path}/{next(iter(dataset))}'")
    images = [name for name, feature in dataset.features.items() if type(feature).__name__ == "Image"]
    for name in images:  # decoded by the worker that needs one, and only then
        dataset = dataset.cast_column(name, datasets.Image(decode=False))
    return dataset


def _file_rows(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise FullshardError(f"{path}: a table needs pyarrow: {MORE}") from None
    try:
        return _read(path, pyarrow).combine_chunks()
    except FullshardError:
        raise
    except Exception as error:
        raise FullshardError(f"cannot read {path}: {first_line(error)}") from None


def _read(path: Path, pyarrow: Any) -> Any:
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        return parquet.read_table(path, page_checksum_verification=True)
    if path.suffix == ".csv":
        import pyarrow.csv as csv

        return csv.read_csv(path)
    return pyarrow.Table.from_pylist(list(_records(path)))


def _records(path: Path) -> Iterator[Record]:
    """The lines of a JSONL file, which must all have the same keys."""
    first: Record | None = None
    for place, record in read_jsonl(path, []):
        first = first or record
        if record.keys() != first.keys():
            odd = sorted(record.keys() ^ first.keys())[0]
            raise FullshardError(f"{place} {'lacks' if odd in first else 'adds'} the key {odd!r}; give every line the same keys")
        yield record
