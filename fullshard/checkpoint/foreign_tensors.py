"""What is found in checkpoints of others, and the checks that hold for each kind of them.

What a file claims decides no allocation: shapes and names are held against the bytes that the files hold.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint.safetensors import is_shape
from fullshard.checkpoint.torch_archive import Archive
from fullshard.checkpoint.torch_pickles import FileTensor
from fullshard.checkpoint.untrusted_files import is_name, quoted
from fullshard.checkpoint.writer import Source
from fullshard.errors import FullshardError
from fullshard.text import bytes_text

INFLATED = 8  # times what the files hold: tied tensors are written once for each of their names
SPARE = 1 << 20  # bytes beyond that


@dataclass(frozen=True)
class Foreign:
    """The tensors of somebody else's checkpoint, the files that hold their bytes, and the names of those among them that
    carry no checksums."""

    sources: Sequence[Source]
    files: frozenset[Path]
    unchecked: tuple[str, ...] = ()


def gathered(sources: Sequence[Source], archives: Iterable[Archive]) -> Foreign:
    opened = list(archives)
    unchecked = {a.path.name for a in opened if not a.sealed}
    return Foreign(sources, frozenset(a.path for a in opened), tuple(sorted(unchecked)))


def refuse_inflated(where: str | Path, found: Foreign) -> None:
    """Refuse tensors that are many times as large as the files: views of a few bytes, or one tensor under many names."""
    held = sum(os.stat(file).st_size for file in found.files)
    claimed = sum(source.nbytes for source in found.sources)
    if claimed > INFLATED * held + SPARE:
        said = f"{where} holds {bytes_text(held)} and claims tensors of {bytes_text(float(min(claimed, 1 << 80)))}"
        raise FullshardError(f"{said}; save its tensors as contiguous copies, each once")


@contextmanager
def known_as(path: str | Path, kind: str) -> Iterator[None]:
    """Turn the errors of looking into a foreign tree that is built otherwise into a sentence."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, IndexError, ValueError, RecursionError):
        raise FullshardError(f"{path} is no {kind}") from None


def below(path: Path, name: Any) -> Path:
    """A file that `path` names must lie in it."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}", name):
        raise FullshardError(f"{path} names {quoted(name)}, which does not lie in it; it is not read")
    return path / name


def as_name(value: Any, path: str | Path) -> str:
    if not is_name(value):
        raise FullshardError(f"{path} has a tensor called {quoted(value)}; rename it, and save it again")
    return str(value)


def as_tensor(value: Any) -> FileTensor:
    if not isinstance(value, FileTensor):
        raise TypeError("no tensor")
    return value


def as_shape(value: Any) -> tuple[int, ...]:
    if not is_shape(value):
        raise TypeError("no shape")
    return tuple(value)


def as_table(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("no table")
    return value
