"""Opens files that other programs wrote: plain files only, with every error of the system as one sentence."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fullshard.base.errors import FullshardError

LONGEST_NAME = 1000  # characters of a tensor's name


@contextmanager
def refusing_os_errors(doing: str, but: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Turn OSErrors, except those in `but`, into a FullshardError. `doing` completes `cannot …`, as in `read model.pt`."""
    try:
        yield
    except but:
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename and str(error.filename) not in doing else ""
        raise FullshardError(f"cannot {doing}: {error.strerror or error}{where}") from None
    except MemoryError:
        raise FullshardError(f"cannot {doing}: there is not enough memory for its largest tensor") from None


def open_plain(path: Path, flags: int = 0, but: tuple[type[OSError], ...] = ()) -> int:
    """Open a plain file for reading; return its descriptor. Raises for pipes, devices and directories, and never waits."""
    with refusing_os_errors(f"read {path}", but):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FullshardError(f"cannot read {path}: it is not a plain file")
    return file


def plain_size(path: Path) -> int:
    """The size of a plain file in bytes."""
    file = open_plain(path)
    try:
        return os.fstat(file).st_size
    finally:
        os.close(file)


def read_range(path: Path, start: int, count: int) -> bytearray:
    """`count` bytes of a file. The caller has checked that the file is long enough."""
    file = open_plain(path)
    try:
        with refusing_os_errors(f"read {path}"):
            data = bytearray(count)
            read_into(file, memoryview(data), start, path)
    finally:
        os.close(file)
    return data


def read_small(path: Path, at_most: int) -> bytes:
    """All bytes of a file. Its size is checked before memory is allocated."""
    size = plain_size(path)
    if size > at_most:
        raise FullshardError(f"cannot read {path}: it has {size} bytes, more than the {at_most} that such a file may have")
    return bytes(read_range(path, 0, size))


def read_into(file: int, into: memoryview, start: int, path: Path) -> None:
    """Fill `into` from `start` on. `path` names the file in errors."""
    done = 0
    while done < len(into):
        with refusing_os_errors(f"read {path}"):
            count = os.preadv(file, [into[done:]], start + done)
        if count == 0:
            raise FullshardError(f"{path} is truncated; fetch it again")
        done += count


def is_name(text: object) -> bool:
    """Whether a text can name a tensor: short, and without line breaks and control characters."""
    return isinstance(text, str) and 0 < len(text) <= LONGEST_NAME and text.isprintable()


def quoted(text: object, most: int = 80) -> str:
    """A value from a file, for an error message: escaped, and shortened to about `most` characters."""
    shortened = repr(text[: most + 1]) if isinstance(text, str | bytes) else f"a {type(text).__name__}"
    return shortened if len(shortened) <= most else f"{shortened[:most]}…"
