"""The tensors of another program's checkpoint, and the checks that all importers share.

No allocation follows what a file claims: shapes and names are checked against the bytes that the files hold.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text
from fullshard.base.untrusted_files import is_name, quoted
from fullshard.checkpoint.other_formats.torch_archive import Archive
from fullshard.checkpoint.other_formats.torch_pickles import FileTensor
from fullshard.checkpoint.safetensors import is_shape
from fullshard.checkpoint.writer import TensorSource

MOST_EXPANSION = 8  # tensors may take this many times the files' bytes: a tied tensor has several names
SPARE = 1 << 20  # bytes that small files may exceed that by


@dataclass(frozen=True)
class ExternalCheckpoint:
    """The tensors of another program's checkpoint and the files that hold them. `unchecked`: names of the files that carry
    no checksums. `prefix`: what the names of weights begin with, if that is known. `expansion`: tensors may take this many times
    the files' bytes."""

    sources: Sequence[TensorSource]
    files: frozenset[Path]
    unchecked: tuple[str, ...] = ()
    prefix: str = ""
    expansion: int = MOST_EXPANSION


def from_archives(sources: Sequence[TensorSource], archives: Iterable[Archive]) -> ExternalCheckpoint:
    """The checkpoint that consists of these tensors in these archives."""
    opened = list(archives)
    unchecked = {a.path.name for a in opened if not a.has_checksums}
    return ExternalCheckpoint(sources, frozenset(a.path for a in opened), tuple(sorted(unchecked)))


def refuse_oversized(where: str | Path, external: ExternalCheckpoint) -> None:
    """Raise if the tensors are many times as large as the files, as with expanded views or one tensor under many names."""
    stored = sum(os.stat(file).st_size for file in external.files)
    claimed = sum(source.nbytes for source in external.sources)
    if claimed > external.expansion * stored + SPARE:
        sizes = f"{where} holds {bytes_text(stored)} and claims tensors of {bytes_text(float(min(claimed, 1 << 80)))}"
        raise FullshardError(f"{sizes}; save its tensors as contiguous copies, each once")


@contextmanager
def refusing_malformed(path: str | Path, kind: str) -> Iterator[None]:
    """Turn the errors of walking through an unexpected structure into a FullshardError. `kind` completes `… is not a …`."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, IndexError, ValueError, RecursionError):
        raise FullshardError(f"{path} is not {kind}") from None


def file_inside(directory: Path, name: Any) -> Path:
    """The path of a file that a checkpoint names. Raises if it would be outside the directory."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}", name):
        raise FullshardError(f"{directory} refers to {quoted(name)}, which is not a file in it; it is not read")
    return directory / name


def as_name(value: Any, path: str | Path) -> str:
    if not is_name(value):
        raise FullshardError(f"{path} has a tensor called {quoted(value)}; rename it, and save it again")
    return str(value)


# A TypeError of the following becomes a sentence in `refusing_malformed`.


def as_tensor(value: Any) -> FileTensor:
    if not isinstance(value, FileTensor):
        raise TypeError("not a tensor")
    return value


def as_shape(value: Any) -> tuple[int, ...]:
    if not is_shape(value):
        raise TypeError("not a shape")
    return tuple(value)


def as_table(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("not a table")
    return value
